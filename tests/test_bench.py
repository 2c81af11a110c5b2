"""``replayssm bench`` on a CPU: the gate, the figures, the JSON, the errors."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_cases import CPU, FAST, TINY, Still, case
from bench_cases import quick_fixture as quick_fixture

from replayssm import KDA, MAMBA2, backends
from replayssm.auto import FoldEvery
from replayssm.backends import torch as torch_backend
from replayssm.bench import kernels, timing
from replayssm.bench.gate import WrongKernel, check_case
from replayssm.bench.kernels import Bench, Rotation, Row, moved_bytes, pool_count
from replayssm.bench.shapes import SHAPES, Shape, select
from replayssm.bench.timing import Clock, Timed
from replayssm.cli import main
from replayssm.layer import LayerState
from replayssm.recurrence import RECURRENCES
from replayssm.traffic import replay_bytes

KEYS = {
    "recurrence", "shape", "mode", "dtype", "inputs", "batch", "T", "accepted", "R", "backend", "us", "x", "gbps",
    "share", "read_gbps", "plain_us", "plain_x", "speedup", "pools", "config",
    "taken",
}  # fmt: skip


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is a hundredth off, under the name "wrong"."""
    module = ModuleType("wrong_backend")

    def verify(*args: Any) -> None:
        torch_backend.verify(*args)
        args[-1].mul_(1.01)

    vars(module).update(verify=verify, fold=torch_backend.fold, refuses=torch_backend.refuses)
    monkeypatch.setitem(sys.modules, "wrong_backend", module)
    monkeypatch.setitem(backends._MODULES, "wrong", "wrong_backend")


# ------------------------------------------------------------------------------------------------ cases


def test_cases_have_the_issue_s_ring_and_cycle() -> None:
    standard, verify, fold = (case(mode=mode) for mode in ("standard", "verify", "fold"))
    assert (standard.T, standard.accepted, standard.limit, standard.R) == (1, 1, 15, 17)
    assert standard.counts == list(range(1, 17))
    assert (verify.T, verify.accepted, verify.limit, verify.R) == (4, 3, 12, 20)
    assert verify.counts == [3, 6, 9, 12, 15]
    assert (fold.T, fold.counts) == (1, [16])
    assert case(mode="verify", draft=8, accepted=8).counts == [8, 16]
    assert case(R=5).counts == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["standard", "verify"])
@pytest.mark.parametrize("draft", [1, 2, 3, 5, 16])
def test_a_cycle_is_what_the_ring_would_do(mode: str, draft: int) -> None:
    it = case(mode=mode, draft=draft)
    ring = Rotation(replace(it, batch=1), CPU).pools[0].ring
    slots, seen = torch.zeros(1, dtype=torch.int32), []
    ring.put(slots, slots, slots + it.counts[0])
    for _ in range(2 * len(it.counts)):
        seen.append(int(ring.count[0]))
        assert seen[-1] <= ring.most
        ring.commit(slots, it.accepted)
    assert seen == 2 * it.counts


def test_rows_and_pools_are_spread_over_the_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 3 * it.checkpoint_bytes // 4)
    it = case(B=8, R=6)  # a cycle of 5 steps
    layers = Rotation(it, CPU)
    assert pool_count(it, CPU) == len(layers.pools) == 3 and layers.calls == 15
    seen = [(layer.ckpt.data_ptr(), tuple(layer.ring.count[:8].tolist())) for layer in layers.layers()]
    assert len(set(seen)) == 15
    for _, counts in seen:
        assert {counts.count(c) for c in it.counts} <= {1, 2}
    assert {counts[0] for _, counts in seen[:3]} == {1, 2, 3}  # at batch 1, the pools stagger each other
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 7 * it.checkpoint_bytes // 4)
    layers = Rotation(it, CPU)
    assert len(layers.pools) == layers.calls == 10  # a pool at each point of the cycle needs one step only
    assert [int(layer.ring.count[0]) for layer in layers.layers()] == 2 * it.counts


def test_shapes_are_selected_by_what_a_run_is_for() -> None:
    every = list(RECURRENCES)
    assert [s.name for s in select(every, None, False, False)] == [s.name for s in SHAPES.values() if not s.small]
    assert [s.name for s in select(every, None, True, False)] == ["mamba2 128x64", "gdn 16/64", "kda 64"]
    assert [s.name for s in select(["gdn"], None, True, True)] == ["gdn small"]
    assert [s.name for s in select(["gdn", "kda"], ["kda 64"], False, True)] == ["kda 64"]


# ------------------------------------------------------------------------------------------------ figures


def test_figures_follow_from_time_and_bytes() -> None:
    it = case(SHAPES["gdn 16/64"], "verify", 8)
    row = Row.of(it, "torch", Timed(4e-3, 10e9), 30e6, Timed(5e-3, 10e9), 2)
    ckpt = 8 * 64 * 128 * 128 * 4
    assert row.us == pytest.approx(4000) and row.plain_us == pytest.approx(5000)
    assert row.x == pytest.approx(4e-3 / (ckpt / 10e9)) and row.plain_x == pytest.approx(5e-3 / (ckpt / 10e9))
    assert row.gbps == pytest.approx(7.5) and row.share == pytest.approx(0.75)
    assert row.speedup == pytest.approx(4 * 5 / 4)  # four tokens a step
    assert Row.of(case(mode="fold"), "torch", Timed(4e-3, 1), 1, Timed(5e-3, 1), 1).speedup == pytest.approx(5 / 4)


@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_moved_bytes_are_those_of_traffic(shape: Shape) -> None:
    it = case(shape)
    layer = Rotation(it, CPU).pools[0]
    assert moved_bytes(it, layer) == pytest.approx(4 * replay_bytes(layer))
    assert moved_bytes(replace(it, mode="fold"), layer) > 2 * it.checkpoint_bytes


def test_what_the_pool_takes_is_said(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(CPU, Still(CPU))
    assert bench.measure(case()).taken == "replay"
    monkeypatch.setattr(kernels, "fold_every", lambda spec, rows, device: FoldEvery(1 if rows < 4 else 16, "few"))
    assert [bench.measure(case(B=B)).taken for B in (2, 4)] == ["plain", "replay"]
    assert bench.measure(case(mode="verify", B=2)).taken == "replay", "the plain recurrence takes nothing back"
    assert bench.measure(case(R=2)).taken == "plain", "it folds at every step"
    assert main(["bench", "--shape", TINY[0].name, "--batch", "2,4", "--mode", "standard", "--no-peers"]) == 0
    starred = [line.endswith(" *") for line in capsys.readouterr().out.splitlines() if line.startswith(TINY[0].name)]
    assert starred == [True, False]


def test_time_is_a_step_s_and_the_plain_step_is_kept(quick: None) -> None:
    bench = Bench(CPU, Still(CPU))
    row = bench.measure(case(), "torch")
    assert row.us == pytest.approx(2000 / 16) and row.plain_us == pytest.approx(2000)
    assert len(bench._plain) == 1
    bench.measure(case(mode="verify"), "torch")
    assert len(bench._plain) == 1


def test_the_cpu_clock_measures() -> None:
    clock = Clock(CPU, repeats=3)
    vars(clock)["_read_buffer"] = torch.ones(1 << 16)
    once = clock.time(lambda: torch.ones(1 << 12).sum())
    many = clock.time(lambda: [torch.ones(1 << 12).sum() for _ in range(200)])
    assert 0 < once.seconds < many.seconds and once.read > 0 and clock.read_bandwidth() > 0
    assert timing.cache_bytes(CPU) >= 1 << 18


# ------------------------------------------------------------------------------------------------ gate


@pytest.mark.parametrize("mode", ["standard", "verify", "fold"])
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_the_gate_lets_right_kernels_through(shape: Shape, mode: str) -> None:
    for dtype, inputs in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        it = replace(case(shape, mode, 5), dtype=dtype, inputs=inputs)
        check_case(it, torch_backend.verify, torch_backend.fold, CPU, "torch")


def off(layer: LayerState, *args: Any) -> None:
    torch_backend.verify(layer, *args)
    args[-1].mul_(1.01)


def stale_ring(layer: LayerState, *args: Any) -> None:
    torch_backend.verify(layer, *args)
    slots, B = args[5], args[5].numel()
    head, count = layer.ring.at(slots)
    layer.w[slots[B - 1].long(), :, (head + count)[B - 1] % layer.ring.R] *= 1.01  # the last row of the batch only


def late_fold(layer: LayerState, *args: Any) -> None:
    before = layer.ckpt.clone()
    torch_backend.verify(layer, *args)
    layer.ckpt.copy_(before)


@pytest.mark.parametrize("broken", [off, stale_ring, late_fold], ids=lambda f: f.__name__)
def test_the_gate_refuses_a_kernel_that_is_wrong(broken: Any) -> None:
    with pytest.raises(WrongKernel, match=r"refusing to time it.*tiny kda, float32, standard, batch 4.*allowed"):
        check_case(case(TINY[2]), broken, torch_backend.fold, CPU, "it")


def test_the_gate_of_a_fold_folds_the_rows_that_are_timed() -> None:
    def one_row_short(layer: LayerState, slots: torch.Tensor, n: torch.Tensor) -> None:
        assert n.tolist() == [16] * 4
        torch_backend.fold(layer, slots, n - 1)

    with pytest.raises(WrongKernel, match="checkpoints"):
        check_case(case(mode="fold"), torch_backend.verify, one_row_short, CPU, "it")


def test_the_command_refuses_a_planted_wrong_backend(
    quick: None, wrong: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    assert main(["bench", "--quick", "--device", "cpu", "--backend", "wrong", "--json", "--out", str(out)]) == 1
    shown = capsys.readouterr()
    assert "refusing to time wrong, which is wrong: tiny mamba2, float32, standard, batch 1" in shown.err
    assert json.loads(shown.out) == [] and not out.exists()


# ------------------------------------------------------------------------------------------------ command


@pytest.mark.parametrize("command", [[*FAST], ["bench", "kernels", *FAST[1:]], ["bench", *FAST[1:], "kernels"]])
def test_json_is_a_list_of_rows(command: list[str], quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--json"] if command[-1] != "kernels" else ["bench", "--json", *command[1:]]) == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    assert all(set(row) == KEYS for row in rows)
    assert [(row["recurrence"], row["mode"], row["batch"]) for row in rows] == [
        (name, mode, B) for name in RECURRENCES for mode in ("standard", "verify", "fold") for B in (1, 8)
    ]
    for row in rows:
        assert row["backend"] == "torch" and row["dtype"] == "float32"
        assert row["x"] == pytest.approx(row["us"] * 3e3 / (row["batch"] * 4 * 32 * 16 * 4))
    assert "read_gbps 3.0" in shown.err and "18/18 tiny kda, float32, fold, batch 8" in shown.err


def test_the_table_is_aligned_and_the_file_says_where_it_is_from(
    quick: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    command = [*FAST, "--recurrence", "kda,gdn", "--dtype", "bfloat16", "--batch", "3", "--mode", "verify"]
    assert main([*command, "--draft", "2", "--accepted", "1", "--rows", "9", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert lines[1].split()[:8] == ["tiny", "gdn", "verify", "bfloat16", "3", "2", "9", "torch"]
    saved = json.loads(out.read_text("utf-8"))
    assert saved["about"]["command"] == "replayssm bench kernels " + " ".join(
        ["--recurrence kda,gdn --dtype bfloat16 --batch 3 --mode verify --draft 2 --accepted 1 --rows 9"
         " --backend torch --no-peers --device cpu --quick"]
    )  # fmt: skip
    assert {"device", "torch", "triton", "commit", "date", "read_gbps"} <= set(saved["about"])
    assert [row["recurrence"] for row in saved["rows"]] == ["gdn", "kda"]


def test_a_quick_run_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing stubbed: the real clock and, at batch 1, pools in rotation."""
    assert main(["bench", "--quick", "--device", "cpu", "--shape", "kda small", "--batch", "1", "--json"]) == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    ours = [row for row in rows if row["mode"] in ("standard", "verify", "fold") and row["backend"] != "transformers"]
    assert [row["mode"] for row in ours] == ["standard", "verify", "fold"]
    for row in rows:
        assert row["us"] > 0 and row["x"] == pytest.approx(row["us"] * row["read_gbps"] * 1e3 / (2 * 64 * 64 * 4))
        assert row["pools"] >= kernels.FEW
    assert "peer fla: not timed: runs on a GPU only" in shown.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recurrence", "mamba3"], "unknown recurrence 'mamba3'; valid: mamba2, gdn, kda"),
        (["--shape", "gdn 1/2"], "unknown shape 'gdn 1/2'; valid: mamba2 128x64, mamba2 96x80, gdn 16/64"),
        (["--dtype", "float32,int8"], "unknown dtype 'int8'; valid: float32, bfloat16, float16"),
        (["--mode", "fast"], "unknown mode 'fast'; valid: standard, verify, fold"),
        (["--mode", ","], "unknown mode ','; valid: standard, verify, fold"),
        (["--backend", "cuda"], "unknown backend 'cuda'; valid: auto, cpu, triton, torch, sequential"),
        (["--backend", "sequential"], "cannot serve this layer: the pool folds every 16 rows"),
        (["--batch", "1,0"], "argument --batch: must be a whole number of at least 1; got '0'"),
        (["--accepted", "5"], "accepted tokens must be from 1 to T = 4; got 5"),
        (["--rows", "7"], "a step of T = 4 tokens needs at least 8 ring rows; got R = 7"),
        (["--recurrence", "gdn", "--shape", "kda 64"], "no shape of --shape kda 64 is of recurrence gdn"),
        (["--tune"], "--tune tries Triton's launch configurations and needs a GPU"),
        (["--plot", "x.doc"], "--plot cannot write 'x.doc'; valid suffixes: "),
        (["--out", "no/such/rows.json"], "does not exist"),
        (["train"], "invalid choice: 'train'"),
    ],
)
def test_bad_input_is_one_clear_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if options[0] == "--plot":
        pytest.importorskip("matplotlib")
    assert main(["bench", "--quick", "--device", "cpu", *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err and shown.err.count("\n") == 1


def test_a_plot(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.png"
    assert main([*FAST, "--recurrence", "gdn", "--mode", "standard", "--plot", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*FAST, "--plot", "out.png"]) == 2
    assert "matplotlib is not installed; pip install 'replayssm[plot]'" in capsys.readouterr().err


def test_recurrences_of_shapes() -> None:
    assert SHAPES["mamba2 96x80"].recurrence is MAMBA2 and SHAPES["kda 64"].recurrence is KDA
