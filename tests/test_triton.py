"""The Triton backend without a GPU: in Triton's interpreter, which reads its switch when triton is imported, so in a
process of its own. On a machine with a GPU the general tests run it compiled (tests/conftest.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replayssm.backends.triton.config import LaunchConfig, candidates, launch_config

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent

CHECK = """
import json, sys, torch
from replayssm.recurrence import Recurrence
from replayssm.backends import triton
from replayssm.backends.triton.config import launch_config
from replayssm.testing import check_backend
decay, erase, dtype, T, launches = sys.argv[1:]
seen = set()
def config(**case):
    made = launch_config(**case | {"rows": 1 if launches == "1" else 1 << 20})
    seen.add(made.launches)
    return made
triton.launch_config = config
recurrence = Recurrence(decay, erase == "True")
row = check_backend("triton", recurrence, dtype=getattr(torch, dtype), T=int(T), steps=8)
print(json.dumps(vars(row) | {"launches": list(seen)}))
"""


# One token on float32 states with a decay by head takes multiply-adds, all else products on tensor cores; one token
# with a decay by head takes one launch where states are few.
@pytest.mark.parametrize(
    ("dtype", "T", "launches"),
    [
        ("float32", 1, 2),
        ("bfloat16", 1, 2),
        ("float32", 3, 2),
        ("bfloat16", 2, 2),
        ("float32", 1, 1),
        ("bfloat16", 1, 1),
    ],
)
@pytest.mark.parametrize("erase", [False, True], ids=["write", "erase"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_against_the_oracle(decay: str, erase: bool, dtype: str, T: int, launches: int) -> None:
    if decay == "channel" and launches == 1:
        pytest.skip("takes two launches always, unless every step folds")
    command = [sys.executable, "-c", CHECK, decay, str(erase), dtype, str(T), str(launches)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["skipped"] is None
    assert row["ok"], row
    assert row["launches"] == [launches]


CORE = "padding or appended or no_tokens or nothing_else or rejected_draft or heads-first"


@pytest.mark.parametrize("recurrence", ["mamba2", "gdn", "kda"])
def test_the_core_in_the_interpreter(recurrence: str) -> None:
    """The tests of test_ops.py that are short there; dtypes, shapes and T are above, all of it runs on a GPU."""
    chosen = f"triton and {recurrence} and not cuda and ({CORE})"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_ops.py", "-k", chosen]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout


PLAIN = """
import torch
from replayssm import GDN, KDA, MAMBA2, LayerSpec, StatePool, ops
from replayssm.testing import Oracle, make_inputs

torch.set_num_threads(1)
rng = torch.Generator().manual_seed(0)
for recurrence in (MAMBA2, GDN, KDA):
    for dtype in (torch.float32, torch.bfloat16):
        spec = LayerSpec(recurrence, 1, 2, 20, 24, dtype, dtype)
        pool, oracle, slots = StatePool(3, fold_every=1, window=3), Oracle(spec, 3), torch.tensor([2, 0]).int()
        layer = pool.add_layer(spec)
        pool.alloc(3)
        for T in (1, 3, 1, 1, 3, 1, 1):  # a step of one token finds up to three committed rows
            x = make_inputs(recurrence, 2, T, 1, 2, 20, 24, dtype, rng)
            oracle.verify(x, slots, ops.verify(layer, *x, slots=slots, backend="triton"))
            accepted = torch.tensor([T, T - 1])
            pool.commit(slots, accepted)
            oracle.commit(accepted)
        ops.fold(pool.layers, slots, backend="triton")
        oracle.fold(layer, slots)
        oracle.check(f"{recurrence.name} {dtype}")
"""


def test_the_plain_recurrence_absorbs_any_number_of_rows() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PLAIN], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TREES = """
import sys
sys.path.insert(0, "tests")
from test_speculative_tree import Recurrence, Run, Where, walk
for erase in (False, True):
    walk(Run(Recurrence(sys.argv[1], erase), Where("triton", "cpu")), 6)
"""


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_trees_against_the_oracle(decay: str) -> None:
    command = [sys.executable, "-c", TREES, decay]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ODD = """
import torch
from replayssm import GDN, KDA, MAMBA2, LayerSpec, StatePool, ops
from replayssm.testing import make_inputs

torch.set_num_threads(1)
rng = torch.Generator().manual_seed(0)
for recurrence in (MAMBA2, GDN, KDA):
    H, HV, K, V, T = 1, 3, 20, 24, 5
    spec, outs, pools = LayerSpec(recurrence, H, HV, K, V), [], []
    slots = torch.tensor([5, -1, 3], dtype=torch.int32)  # phases 1 and 3
    state = torch.randn(3, HV, V, K, generator=rng)  # not zero, so that its decay shows
    steps = [make_inputs(recurrence, 3, T, H, HV, K, V, torch.float32, rng) for _ in range(3)]
    for backend in ("triton", "torch"):
        pool = StatePool(6, fold_every=4, window=T, backend=backend)
        layer, out = pool.add_layer(spec), []
        pool.alloc(6)
        assert pool.ring.head[5] == pool.ring.R and pool.ring.head[3] == 3 * pool.ring.R
        ops.seed(pool.layers[0], state, slots)
        for x in steps:
            packed = torch.cat([y.flatten(2) for y in (x.q, x.k, x.v)], -1)  # views of one projection
            q, k, v = (y.unflatten(2, (-1, n)) for y, n in zip(packed.split([H * K, H * K, HV * V], -1), (K, K, V)))
            assert not v.is_contiguous()
            q = q.half()  # not of k's dtype
            out.append(ops.verify(layer, q, k, v, x.w, x.g, slots=slots, backend=backend))
            pool.commit(slots, torch.tensor([2, 0, 3]))
        pools.append(pool)
        outs.append(torch.stack(out))
    for a, b in [outs, *zip(*(pool._slot_tensors() + [pool.ring.head, pool.ring.count] for pool in pools))]:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert (pools[0].ring.head[[5, 3]] < pools[0].ring.R).all(), "a phase is left: no fold was part of the test"
"""


def test_odd_shapes_strided_views_and_staggered_folds_as_the_torch_backend() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", ODD], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LONG = """
import torch
from replayssm import GDN, KDA, LayerSpec, Recurrence, StatePool, ops
from replayssm.testing import Oracle, make_inputs

torch.set_num_threads(1)
rng = torch.Generator().manual_seed(0)
fourth = Recurrence(decay="channel", erase=False)  # with 153 numbers of 16 bits in a workspace of 32
single, half = torch.float32, torch.bfloat16
for recurrence, dtype, HV, K in ((GDN, single, 2, 48), (KDA, half, 2, 48), (fourth, half, 1, 17)):
    H, V, T = 1, 40, 3
    spec = LayerSpec(recurrence, H, HV, K, V, dtype)
    pool, oracle, slots = StatePool(4, fold_every=22, window=T), Oracle(spec, 4), torch.tensor([2, 3, 0]).int()
    layer, most, folds = pool.add_layer(spec), 0, 0
    pool.alloc(4)
    for _ in range(11):
        x = make_inputs(recurrence, 3, T, H, HV, K, V, torch.float32, rng)
        before = pool.ring.count[slots.long()]
        oracle.verify(x, slots, ops.verify(layer, *x, slots=slots, backend="triton"))
        accepted = torch.tensor([3, 2, 3])
        pool.commit(slots, accepted)
        oracle.commit(accepted)
        most, folds = max(most, int(before.max())), folds + int((pool.ring.count[slots.long()] < before).sum())
    assert most > 16 and folds, "no fold of many rows"
    ops.fold(pool.layers, slots, backend="triton")
    oracle.fold(layer, slots)
    oracle.check(f"{recurrence.name} {dtype}")
"""


def test_rings_of_more_rows_than_a_product_takes() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", LONG], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


HEADS = """
import torch
from replayssm import KDA, MAMBA2, LayerSpec, StatePool, ops
from replayssm.backends import triton
from replayssm.backends.triton.config import LaunchConfig
from replayssm.testing import make_inputs

for recurrence in (MAMBA2, KDA):
    rng = torch.Generator().manual_seed(0)
    spec, slots = LayerSpec(recurrence, 2, 8, 16, 16), torch.tensor([2, 0], dtype=torch.int32)
    pools = [StatePool(3, fold_every=2, window=2) for _ in range(4)]
    for pool in pools:
        pool.add_layer(spec)
    for _ in range(3):
        x = make_inputs(recurrence, 2, 2, 2, 8, 16, 16, torch.float32, rng)
        outs = []
        for heads, pool in zip((16, 2, 1), pools):
            outs.append(torch.empty_like(x.v))
            triton.launch_verify(pool.layers[0], *x, slots, outs[-1], LaunchConfig(16, heads=heads))
        outs.append(ops.verify(pools[-1].layers[0], *x, slots=slots, backend="torch"))
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
        torch.testing.assert_close(outs[0], outs[3], rtol=1e-5, atol=1e-5)
        for pool in pools:
            pool.commit(slots, 2)
"""


def test_value_heads_are_shared_out_to_programs() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", HEADS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# In a file of its own: Triton reads its kernels' source.
PARTS = """
import torch, triton, triton.language as tl
from replayssm.backends.triton.tiles import exp, parts

@triton.jit
def take_apart(x, out, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    o = tl.arange(0, 64)
    made = parts(tl.load(x + o), PARTS, DTYPE)
    for i in tl.static_range(len(made)):
        tl.store(out + i * 64 + o, made[i].to(tl.float32))

@triton.jit
def decay(x, out):
    o = tl.arange(0, 64)
    tl.store(out + o, exp(tl.load(x + o), True))

torch.manual_seed(0)
for dtype, n, to, kept in (
    (torch.float32, 3, tl.bfloat16, 8), (torch.float32, 2, tl.float32, 11), (torch.float16, 3, tl.bfloat16, 8),
    (torch.bfloat16, 3, tl.bfloat16, 8), (torch.float16, 2, tl.float32, 11),
):
    x, out = torch.randn(64).to(dtype), torch.zeros(3, 64)
    take_apart[(1,)](x, out, n, to)
    assert (out.sum(0) - x.float()).abs().max() <= 2.0 ** (-min(kept * n, 24)) * 8, (dtype, to)
    first = out[0].view(torch.int32) & ((1 << (24 - kept)) - 1)
    assert (first == 0).all(), f"tensor cores would round {dtype} as {to}"
x = torch.cat([-torch.rand(32) / 100, -torch.rand(29) * 90, torch.tensor([0.0, -1e30, -torch.inf])])
out = torch.zeros(64)
decay[(1,)](x, out)
exact = x.double().exp()
assert ((out.double() - exact).abs() <= 1.3e-7 * exact + 1e-37).all()
"""


def test_numbers_are_taken_apart_as_tensor_cores_take_them(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PARTS)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_configuration_is_a_pure_function_that_fits_the_layer() -> None:
    for state_bits in (16, 32):
        for channel in (False, True):
            for K, V in [(16, 16), (128, 64), (128, 80), (96, 192), (256, 256)]:
                for T in (1, 2, 16):
                    case = dict(channel=channel, erase=True, state_bits=state_bits, K=K, V=V, T=T)
                    config = launch_config(**case)
                    assert max(16, 2 * V) > config.BV >= 16, "tensor cores take 16 rows at a time"
                    assert config.dot == (state_bits == 16 or T > 1 or channel)
                    assert sorted(config.order) == ["b", "h", "v"]
                    assert candidates(**case)[0] == config
                    assert len(set(candidates(**case))) == len(candidates(**case)) > 2
                    one = launch_config(**case, rows=1)
                    assert one.launches == (1 if T == 1 and not channel else 2)
                    assert one.launches == 2 or one.BV * K * state_bits <= 64 * 32 * 4 * 32, "states fit into registers"
                    assert launch_config(**case, rows=1, ring=17).launches == 2


def test_a_configuration_that_miscompiles_is_refused() -> None:
    with pytest.raises(ValueError, match=r"BV >= 16 \* num_warps; got BV=64, num_warps=8"):
        LaunchConfig(BV=64, num_warps=8, dot=True)
    with pytest.raises(ValueError, match="power of two up to 32; got heads=3"):
        LaunchConfig(BV=16, heads=3)
