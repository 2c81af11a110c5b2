"""``replayssm bench``: peers, and tuning with stand-in configurations."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_cases import CPU, FAST, TINY, Still, case
from bench_cases import quick_fixture as quick_fixture

from replayssm.backends import torch as torch_backend
from replayssm.bench import kernels, peers, timing
from replayssm.bench.gate import WrongKernel
from replayssm.bench.kernels import Bench, Row
from replayssm.bench.shapes import Case, Shape
from replayssm.bench.timing import Timed
from replayssm.bench.tune import Tuned, tune
from replayssm.cli import main
from replayssm.recurrence import RECURRENCES

# ------------------------------------------------------------------------------------------------ peers


@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_stock_transformers_is_a_peer(shape: Shape, quick: None) -> None:
    pytest.importorskip("transformers")
    peer = next(peer for peer in peers.PEERS if peer.name == "transformers")
    row = peers.measure(peer, case(shape), Bench(CPU, Still(CPU)))
    assert isinstance(row, Row), row
    assert row.backend == "transformers" and row.us == pytest.approx(2000)


def test_a_peer_that_is_not_timed_has_a_reason(quick: None) -> None:
    bench = Bench(CPU, Still(CPU))
    fla, mamba_ssm, _, stock = peers.PEERS
    assert peers.measure(fla, case(), bench) == "no mamba2 step"
    assert peers.measure(mamba_ssm, case(), bench) == "runs on a GPU only"
    assert peers.measure(stock, replace(case(), dtype=torch.bfloat16), bench) == "keeps no state in bfloat16"
    assert peers.measure(stock, case(mode="verify"), bench) == "no step of mode verify here"
    absent = replace(mamba_ssm, where={"mamba2": ("no_such_package", "step")}, gpu=False)
    why = peers.measure(absent, case(), bench)
    assert why == "not installed (pip install mamba-ssm): No module named 'no_such_package'"
    broken = replace(stock, make=lambda *args: (_ for _ in ()).throw(RuntimeError("old\nversion")))
    if sys.modules.get("transformers"):
        assert peers.measure(broken, case(), bench) == "failed: RuntimeError: old"


def test_a_peer_that_is_wrong_is_not_timed(quick: None) -> None:
    peer = replace(
        peers.PEERS[3], where={"kda": ("torch", "zeros")},
        make=lambda function, it, inputs: peers.Step(inputs, lambda S: (function(inputs.v.shape), S)),
    )  # fmt: skip
    why = peers.measure(peer, case(TINY[2]), Bench(CPU, Still(CPU)))
    assert isinstance(why, str) and why.startswith("breaks the oracle's rule: error of its outputs")


# GPU peers' calls, with functions of the documented form that compute on the CPU what the real ones do.
def stand_in_ssu(state, x, dt, A, B, C, D=None, dt_bias=None):
    assert dt.stride(-1) == dt_bias.stride(-1) == A.stride(-1) == A.stride(-2) == 0
    group = state.shape[1] // B.shape[1]
    B, C = (y.repeat_interleave(group, 1).float() for y in (B, C))
    dt = dt.float()
    new = state.float() * (dt[..., None] * A).exp() + (dt * x)[..., None] * B[:, :, None]
    state.copy_(new)
    return (new @ C[..., None])[..., 0].to(x.dtype)


def stand_in_gdn(q, k, v, state, A_log, a, dt_bias, b, scale, use_qk_l2norm):
    from replayssm.gates import gdn_gate
    from replayssm.testing import Inputs, plain

    assert scale == 1.0 and not use_qk_l2norm
    inputs = Inputs(q, k, v, b.float().sigmoid(), gdn_gate(a, A_log, dt_bias))
    out, states = plain(RECURRENCES["gdn"], state, inputs)
    return out, state.copy_(states[1])


def stand_in_fla(q, k, v, g, beta, scale, initial_state, output_final_state):
    from replayssm.testing import Inputs, plain

    assert scale == 1.0 and output_final_state
    kind = RECURRENCES["kda" if g.dim() == 4 else "gdn"]
    out, states = plain(kind, initial_state.mT, Inputs(q, k, v, beta, g))
    return out, states[1].mT


@pytest.mark.parametrize(
    ("name", "index", "function"),
    [("mamba-ssm", 0, stand_in_ssu), ("flashinfer", 0, stand_in_ssu), ("flashinfer", 1, stand_in_gdn),
     ("fla", 1, stand_in_fla), ("fla", 2, stand_in_fla)],
)  # fmt: skip
def test_gpu_peers_get_the_recurrence_s_numbers(
    name: str, index: int, function: Any, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("stand_in_peer")
    vars(module)["step"] = function
    monkeypatch.setitem(sys.modules, "stand_in_peer", module)
    peer = next(peer for peer in peers.PEERS if peer.name == name)
    where = {TINY[index].recurrence.name: ("stand_in_peer", "step")}
    it = replace(case(TINY[index], B=5), inputs=torch.bfloat16)
    row = peers.measure(replace(peer, where=where, gpu=False), it, Bench(CPU, Still(CPU)))
    assert isinstance(row, Row), row


# ------------------------------------------------------------------------------------------------ tuning


@dataclass(frozen=True)
class Config:
    """A stand-in for LaunchConfig: ``loops`` is its time, ``error`` what it is off by."""

    loops: int
    error: float = 0.0


def launch(*args: Any, config: Config) -> None:
    if config.loops > 9:
        raise RuntimeError("out of resources")
    torch_backend.verify(*args)
    args[-1].mul_(1 + config.error)


@pytest.mark.parametrize("mode", ["standard", "verify"])
def test_tune_takes_the_fastest_that_is_right(mode: str, quick: None) -> None:
    class Counts(Still):
        def time(self, run: timing.Run) -> Timed:
            calls.clear()
            run()
            return Timed(len(calls) * 1e-3, 3e9)

    calls: list[None] = []

    def counted(*args: Any, config: Config) -> None:
        launch(*args, config=config)
        calls.extend([None] * config.loops)

    it = case(TINY[2], mode)
    configs = [Config(3), Config(1, 0.01), Config(2), Config(10), Config(4)]
    told: list[str] = []
    tuned = tune(it, Bench(CPU, Counts(CPU)), configs, counted, told.append)
    assert tuned.config == Config(2) and tuned.us == pytest.approx(2000)
    assert [config for config, _ in tuned.times] == [Config(3), Config(2), Config(4)]
    assert [config for config, _ in tuned.refused] == [Config(1, 0.01), Config(10)]
    assert tuned.line.startswith("tiny kda") and tuned.line.endswith("Config(loops=2, error=0.0)")
    assert f"{tuned.us:.1f} us, x {tuned.x:.2f}" in tuned.line
    assert len(told) == 5 and json.loads(json.dumps(tuned.plain()))["config"] == {"loops": 2, "error": 0.0}


def test_tune_refuses_where_nothing_is_right(quick: None) -> None:
    with pytest.raises(WrongKernel, match="no launch configuration is right for tiny mamba2"):
        tune(case(), Bench(CPU, Still(CPU)), [Config(1, 0.01)], launch)


def test_tune_prints_a_line_a_case(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from replayssm.cli import bench as command

    def tuned(it: Case, bench: Bench, tell: Any) -> Tuned:
        return Tuned(it, Config(1), 12.5, 1.25, [(Config(1), 12.5)], [(Config(2), "WrongKernel: off")])

    monkeypatch.setattr("replayssm.bench.tune.tune", tuned)
    monkeypatch.setattr(command, "_check_files", lambda args, device: None)
    assert main([*FAST, "--tune", "--recurrence", "mamba2"]) == 0
    shown = capsys.readouterr()
    lines = [line for line in shown.out.splitlines() if "Config" in line]
    assert all(line.endswith("12.5 us, x 1.25, Config(loops=1, error=0.0)") for line in lines)
    assert lines[0].startswith("tiny mamba2, float32, standard") and len(set(lines)) == len(lines)
    assert "refused: Config(loops=2, error=0.0): WrongKernel: off" in shown.err


def test_the_plain_kernel_is_the_fastest_that_is_right(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    """On a GPU; here with stand-ins for the launches."""
    triton = pytest.importorskip("replayssm.backends.triton")
    monkeypatch.setattr(triton, "refuses", lambda layer: None)
    monkeypatch.setattr("replayssm.backends.cpu.refuses", lambda layer: "not here")
    monkeypatch.setattr(triton, "launch_verify", launch)
    monkeypatch.setattr(triton, "fold", torch_backend.fold)
    monkeypatch.setattr(kernels, "plain_configs", lambda K, V: [Config(1, 0.01), Config(2), Config(1)])
    timed = [Timed(3e-3, 3e9), Timed(1e-3, 3e9)]
    monkeypatch.setattr(Still, "time", lambda self, run: timed.pop(0))
    assert Bench(CPU, Still(CPU)).plain(case(TINY[0])).seconds == pytest.approx(1e-3) and not timed
    monkeypatch.setattr(kernels, "plain_configs", lambda K, V: [Config(1, 0.01)])
    with pytest.raises(WrongKernel, match="the plain kernel with Config"):
        Bench(CPU, Still(CPU)).plain(case(TINY[0]))
