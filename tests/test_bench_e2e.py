"""``replayssm bench e2e`` on a CPU: the rows, the parts, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import Still

from replayssm.bench import timing
from replayssm.cli import main

pytest.importorskip("transformers")
from replayssm.bench import e2e, models

KEYS = {
    "model", "layers", "variant", "dtype", "state_dtype", "batch", "T", "prompt", "ms", "lowest", "highest",
    "tokens_per_s", "peak_bytes", "weight_bytes", "state_bytes", "floor_ms", "first_ms", "warm_s", "launches", "parts",
}  # fmt: skip


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "Clock", Still)


def test_rows_as_json_and_as_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    command = ["bench", "e2e", "--device", "cpu", "--quick", "--batch", "1,3", "--prompt", "6", "--json"]
    assert main([*command, "--config", "tiny-gdn,tiny-mamba2", "--out", str(out), "--plot", str(picture)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == json.loads(out.read_text())["rows"] and picture.stat().st_size > 1000
    assert all(set(row) == KEYS for row in rows)
    cases = [(row["model"], row["batch"], row["variant"], row["T"]) for row in rows]
    variants = [(v, 1) for v in e2e.VARIANTS] + [("replay-verify", 4)]
    assert cases == [(m, b, *v) for m in ("tiny-gdn", "tiny-mamba2") for b in (1, 3) for v in variants]
    for row in rows:
        assert 0 < row["lowest"] <= row["ms"] <= row["highest"]
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * max(1, row["T"] - 1) / row["ms"] * 1e3)
        assert row["floor_ms"] == pytest.approx((row["weight_bytes"] + row["state_bytes"]) / 3e9 * 1e3)


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "e2e", "--device", "cpu", "--quick", "--batch", "2", "--prompt", "6", "--layers", "4"]
    assert main([*command, "--variant", "replay-on"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tiny-gdn") and " replay-on " in line for line in lines)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--config", "huge"], "unknown config 'huge'; valid: qwen3.5-4b"),
        (["--variant", "stock"], "unknown variant 'stock'; valid: stock-eager"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--batch", "0"], "argument --batch"),
        (["--new-tokens", "4", "--variant", "replay-on"], "--new-tokens is of variant replay-verify"),
        (["--new-tokens", ","], "argument --new-tokens: it names no number; got ','"),
        (["--device", "meta"], "device 'meta' cannot be used"),
        (["--out", "/nowhere/x.json"], "does not exist"),
    ],
)
def test_bad_input_is_one_line(options: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "e2e", "--device", "cpu", *options]) == 2
    said = capsys.readouterr().err
    assert error in said and said.count("\n") == 1
    assert main(["bench", "--tune", "e2e", "--device", "cpu"]) == 2
    assert "--tune is an option of bench kernels" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tiny-gdn", "tiny-mamba2"])
def test_the_bytes_of_states_are_those_of_a_cache(name: str) -> None:
    import replayssm

    model = replayssm.attach(models.build(name, None, torch.float32, torch.device("cpu")))
    cache: Any = model(torch.ones(3, 5, dtype=torch.long)).cache
    held = sum(state.ckpt.numel() * state.ckpt.element_size() for state in cache.recurrent.states.values())
    assert held == e2e.state_bytes(model.config, 3, torch.float32)
    replayssm.detach(model)


@pytest.mark.parametrize(("name", "layers", "recurrent"), [("qwen3.5-4b", 32, 24), ("nemotron-3-nano-4b", 42, 21)])
def test_real_sizes(name: str, layers: int, recurrent: int) -> None:
    config = models.CONFIGS[name](None)
    assert (config.num_hidden_layers, config.layer_types.count("linear_attention")) == (layers, recurrent)
    assert models.CONFIGS[name](6).num_hidden_layers == 6


def test_only_steps_that_verify_have_several_tokens() -> None:
    model = models.build("tiny-gdn", None, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="stock-eager takes one token a step; got T=4"):
        e2e.measure("tiny-gdn", model, "stock-eager", 1, T=4, read=1e9)


def test_kernels_by_what_they_are_for() -> None:
    kernels = {
        "read_kernel": "state", "prepare_kernel": "state", "nvjet_sm90_tst_8x64": "weights",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>": "weights", "fmha_cutlassF_bf16": "attention",
        "triton_poi_fused_copy_5": "rest",
    }  # fmt: skip
    assert {kernel: e2e.part(kernel) for kernel in kernels} == kernels


def test_the_floor_has_the_experts_that_tokens_meet() -> None:
    with torch.device("meta"):
        config = models.CONFIGS["kimi-linear-48b-a3b"](4)
        model: Any = models.transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    experts = sum(p.numel() * 2 for name, p in model.named_parameters() if p.dim() == 3 and ".experts." in name)
    assert 0 < experts < total and (config.num_experts, config.num_experts_per_token) == (256, 8)
    for tokens in (1, 32):
        met = experts * (1 - (31 / 32) ** tokens)
        assert e2e.weights_read(model, tokens) == pytest.approx(total - experts + met)
