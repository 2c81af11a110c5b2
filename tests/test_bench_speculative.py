"""``replayssm bench speculative`` on a CPU: the baseline, the figures, the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import CPU, TINY, Still
from bench_cases import quick_fixture as quick_fixture

from replayssm.bench import drafts, snapshot, speculative
from replayssm.bench.gate import WrongKernel
from replayssm.bench.kernels import Bench
from replayssm.bench.shapes import Case, Shape
from replayssm.cli import main
from replayssm.lookup import EarlierOutputs
from replayssm.recurrence import RECURRENCES
from replayssm.testing import Inputs

pytest.importorskip("transformers")
LAYERS = ["bench", "speculative", "--device", "cpu", "--quick", "--part", "layers", "--backend", "torch"]
MODELS = ["bench", "speculative", "--device", "cpu", "--quick", "--part", "models", "--recurrence", "gdn"]
LAYER_KEYS = {
    "part", "recurrence", "shape", "dtype", "inputs", "batch", "T", "accepted", "R", "backend", "us", "plain_us",
    "snapshot_us", "traffic_us", "read_gbps", "bytes", "plain_bytes", "snapshot_bytes",
}  # fmt: skip
MODEL_KEYS = {
    "part", "model", "drafter", "draft_tokens", "temperature", "tokens", "tokens_per_s", "speedup", "forwards",
    "drafted", "accepted", "acceptance", "tokens_per_forward", "identical", "bytes", "snapshot_bytes",
}  # fmt: skip


def cases(shape: Shape = TINY[0], B: int = 5, lengths: tuple[int, ...] = (1, 2, 5), **options: Any) -> list[Case]:
    dtypes = {"dtype": torch.float32, "inputs": torch.float32} | options
    return speculative.cases(shape, dtypes["dtype"], dtypes["inputs"], B, lengths, options.get("accepted"))


@pytest.fixture(scope="module", name="model")
def model_fixture() -> Any:
    from replayssm.cli.checkpoint import load
    from replayssm.tiny import tiny_model

    threads = torch.get_num_threads()
    yield load(tiny_model("gdn"))
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------ layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_snapshots_are_the_recurrence(shape: Shape, dtype: torch.dtype) -> None:
    for case in cases(shape, dtype=dtype, inputs=torch.bfloat16 if dtype != torch.float32 else dtype):
        snapshot.check(case, CPU)


def no_erase(case: Case, states: Any, last: Any, inputs: Inputs, out: Any) -> None:
    snapshot.snapshots(states, last, inputs, out, case.shape.recurrence.channel, erase=False)


def from_the_first(case: Case, states: Any, last: Any, *rest: Any) -> None:
    snapshot.step(case, states, torch.zeros_like(last), *rest)


def one_state_lost(case: Case, states: Any, *rest: Any) -> None:
    before = states[1].clone()
    snapshot.step(case, states, *rest)
    states[1] = before


@pytest.mark.parametrize("broken", [no_erase, from_the_first, one_state_lost], ids=lambda f: f.__name__)
def test_wrong_snapshots_are_not_timed(broken: Any) -> None:
    with pytest.raises(WrongKernel, match="refusing to time snapshots, which are wrong: tiny gdn"):
        snapshot.check(cases(TINY[1])[-1], CPU, broken)


def test_a_case_has_the_ring_of_a_pool() -> None:
    made = cases(lengths=(1, 4, 16))
    assert [(case.R, case.limit, case.accepted) for case in made] == [(17, 15, 1), (23, 15, 3), (47, 15, 15)]
    assert [case.accepted for case in cases(lengths=(1, 4, 16), accepted=3)] == [1, 3, 3]


def test_figures_of_a_layer(quick: None) -> None:
    case = cases(TINY[2], B=8, lengths=(4,))[0]
    torch_row, auto = speculative.measure(case, Bench(CPU, Still(CPU)), ("torch", "auto", "torch"))
    state, steps = 4 * 32 * 16 * 4, len(case.counts)
    assert (torch_row.backend, torch_row.T) == ("torch", 4) and auto.backend != "torch"
    assert torch_row.us == pytest.approx(2000 / steps) and torch_row.plain_us == pytest.approx(4 * 2000)
    assert torch_row.snapshot_us == auto.snapshot_us == pytest.approx(2000)
    assert torch_row.traffic_us == pytest.approx(5 * 8 * state / 3e9 * 1e6)
    assert (torch_row.plain_bytes, torch_row.snapshot_bytes) == (state, 4 * state)
    row = 4 * (2 * 32 + 4 * 16 + 4 + 4 * 32)  # k, d, w, and g of every key channel
    assert torch_row.bytes == state + 23 * row + 8


def test_snapshots_outgrow_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases(TINY[1], lengths=(4,))[0]
    monkeypatch.setattr(snapshot, "pool_count", lambda case, device: 9)
    buffers = snapshot.Snapshots(case, CPU)
    assert len({states.data_ptr() for states in buffers.states}) == 3 and set(buffers.last.tolist()) == {0, 1, 2, 3}
    before = [states.clone() for states in buffers.states]
    buffers.run()
    assert not any(states.equal(old) for states, old in zip(buffers.states, before, strict=True))


# ------------------------------------------------------------------------------------------------ models


def drafting(checkpoint: Any, **options: Any) -> drafts.Drafting:
    prompts = [torch.tensor([checkpoint.encode(prompt)]) for prompt in drafts.PROMPTS[:2]]
    return drafts.Drafting("gdn", checkpoint.model, prompts, **({"tokens": 12, "repeats": 1} | options))


def test_figures_of_a_model(model: Any) -> None:
    told: list[str] = []
    rows = list(drafting(model, tell=told.append).measure(["none", "prompt-lookup"], [3, "auto"]))
    assert [(row.drafter, row.draft_tokens) for row in rows] == [
        ("stock", None), ("none", None), ("prompt-lookup", 3), ("prompt-lookup", "auto")
    ]  # fmt: skip
    assert all(row.identical and row.tokens == 24 and row.tokens_per_s > 0 for row in rows)
    assert rows[0].speedup == 1 and rows[2].speedup == pytest.approx(rows[2].tokens_per_s / rows[0].tokens_per_s)
    for row in rows[:2]:
        assert (row.forwards, row.drafted, row.tokens_per_forward) == (22, 0, 1)
    for row in rows[2:]:
        assert 0 < row.accepted < row.drafted and row.acceptance == row.accepted / row.drafted
        assert row.forwards == 22 - row.accepted and row.tokens_per_forward == pytest.approx(22 / row.forwards)
    stock, none, three, auto = rows
    state = 4 * 4 * 64 * 32 * 4  # layers, heads, V, K, float32
    assert none.snapshot_bytes == stock.bytes > state
    window = (stock.bytes - state) // 4  # a column of all layers' convolutions
    assert three.snapshot_bytes == 4 * state + 4 * window + 3 * window
    assert stock.bytes < none.bytes < three.bytes < auto.bytes < three.snapshot_bytes
    assert told.count("gdn prompt-lookup 3") == 2 and not hasattr(model.model, "_replayssm")


def test_earlier_outputs_are_those_of_one_pass(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass must not find what another wrote to the same prompts."""
    made: list[EarlierOutputs] = []

    def make() -> EarlierOutputs:
        made.append(EarlierOutputs())
        return made[-1]

    monkeypatch.setitem(drafts.DRAFTERS, "earlier-outputs", make)
    list(drafting(model, repeats=2, tokens=4).measure(["earlier-outputs"], [4]))
    assert [len(drafter._grams._texts) for drafter in made] == [1, 2, 2]  # before anything is timed, then two passes


def test_a_text_that_differs_is_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import replayssm

    generate = replayssm.generate

    def off(*args: Any, **options: Any) -> Any:
        out = generate(*args, **options)
        out.sequences[0, -1] += 1
        return out

    monkeypatch.setattr(replayssm, "generate", off)
    assert [row.identical for row in drafting(model).measure(["none"], [])] == [True, False]


# ------------------------------------------------------------------------------------------------ command


def test_json_is_a_list_of_rows_of_layers(quick: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, threads = tmp_path / "rows.json", torch.get_num_threads()
    assert main([*LAYERS, "--json", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    assert all(set(row) == LAYER_KEYS and row["part"] == "layer" for row in rows)
    assert [(row["recurrence"], row["T"]) for row in rows] == [
        (name, T) for name in RECURRENCES for T in (1, 2, 4, 8, 16)
    ]
    saved = json.loads(out.read_text("utf-8"))
    assert saved["rows"] == rows and saved["about"]["command"] == (
        "replayssm bench speculative --backend torch --device cpu --quick --part layers"
    )
    assert "3/3 tiny kda, float32, verify, batch 8, T 16" in shown.err and torch.get_num_threads() == threads


def test_tables_are_aligned_and_a_plot_is_drawn(
    quick: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    command = [word for word in MODELS if word not in ("--part", "models")]
    command += [
        "--new-tokens",
        "3,1",
        "--batch",
        "2",
        "--tokens",
        "6",
        "--temperature",
        "0.8",
        "--drafter",
        "prompt-lookup",
    ]
    assert main([*command, "--draft-tokens", "2", "--plot", str(tmp_path / "x.png")]) == 0
    _, layers, models = capsys.readouterr().out.split("\n\n")
    lines = layers.splitlines()[:3]
    assert len({len(line) for line in lines}) == 1 and [line.split()[4] for line in lines[1:]] == ["1", "3"]
    lines = models.splitlines()[:3]
    assert len({len(line) for line in lines}) == 1 and lines[2].split()[:3] == ["gdn", "prompt-lookup", "2"]
    assert lines[2].endswith("sampled") and (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_json_of_models_and_exit_code(
    quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*MODELS, "--tokens", "6", "--drafter", "none", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(set(row) == MODEL_KEYS and row["part"] == "model" for row in rows) and len(rows) == 2
    monkeypatch.setattr(
        drafts.Drafting, "measure", lambda *_: iter([drafts.ModelRow(**rows[1] | {"identical": False})])
    )
    assert main([*MODELS, "--json"]) == 1


def test_wrong_snapshots_end_the_run(
    quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(case: Case, device: Any) -> None:
        raise WrongKernel("refusing to time snapshots")

    monkeypatch.setattr(snapshot, "check", wrong)
    assert main([*LAYERS, "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == [] and "replayssm: refusing to time snapshots" in shown.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--part", "engines"], "unknown part 'engines'; valid: layers, models"),
        (["--drafter", "oracle"], "unknown drafter 'oracle'; valid: none, prompt-lookup, earlier-outputs"),
        (["--draft-tokens", "4,many"], "argument --draft-tokens: must be a whole number of at least 1; got 'many'"),
        (["--new-tokens", "0"], "argument --new-tokens: must be a whole number of at least 1; got '0'"),
        (["--backend", "torch,cuda"], "unknown backend 'cuda'; valid: auto, cpu, triton, torch, sequential"),
        (["--backend", "sequential"], "cannot serve this layer: the pool folds every 16 rows"),
        (["--recurrence", "gdn", "--shape", "kda 64"], "no shape of --shape kda 64 is of recurrence gdn"),
        (["--tokens", "1"], "argument --tokens: must be a whole number of at least 2; got '1'"),
        (["--out", "no/such/rows.json"], "does not exist"),
    ],
)
def test_bad_input_is_one_clear_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speculative", "--quick", "--device", "cpu", *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err and shown.err.count("\n") == 1


def test_options_of_the_other_command_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--mode", "verify", "speculative", "--quick", "--device", "cpu"]) == 2
    assert "--mode is an option of bench kernels, not of bench speculative" in capsys.readouterr().err


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*LAYERS, "--plot", "out.png"]) == 2
    assert "matplotlib is not installed; pip install 'replayssm[plot]'" in capsys.readouterr().err
