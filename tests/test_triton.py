"""The Triton backend without a GPU: in Triton's interpreter, which reads its switch when triton is imported, so in a
process of its own. On a machine with a GPU the general tests run it compiled (tests/conftest.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from replayssm.backends.triton.config import LaunchConfig, launch_config

pytest.importorskip("triton")

CHECK = """
import json, sys, torch
from replayssm.recurrence import Recurrence
from replayssm.testing import check_backend
decay, erase, dtype, T = sys.argv[1:]
recurrence = Recurrence(decay, erase == "True")
row = check_backend("triton", recurrence, dtype=getattr(torch, dtype), T=int(T), steps=8)
print(json.dumps(vars(row)))
"""


# One token takes row sums in float32 and products in bfloat16; several tokens take the triangular solve.
@pytest.mark.parametrize(("dtype", "T"), [("float32", 1), ("bfloat16", 1), ("float32", 3)])
@pytest.mark.parametrize("erase", [False, True], ids=["write", "erase"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_against_the_oracle(decay: str, erase: bool, dtype: str, T: int) -> None:
    command = [sys.executable, "-c", CHECK, decay, str(erase), dtype, str(T)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["skipped"] is None
    assert row["ok"], row


def test_a_configuration_is_a_pure_function_that_fits_the_layer() -> None:
    for state_bits in (16, 32):
        for erase, channel in [(False, False), (True, False), (True, True), (False, True)]:
            for K, V in [(16, 16), (128, 64), (128, 80), (96, 192), (256, 256)]:
                for T in (1, 2, 16):
                    config = launch_config(
                        erase=erase, channel=channel, state_bits=state_bits, K=K, V=V, T=T, capability=(8, 0)
                    )
                    assert max(16, 2 * V) >= config.BV
                    assert config.BV % config.BF == 0
                    assert not config.pdl, "programmatic launches come with Hopper"


def test_a_configuration_that_miscompiles_is_refused() -> None:
    with pytest.raises(ValueError, match=r"BV >= 16 \* num_warps; got BV=64, num_warps=8"):
        LaunchConfig(BV=64, num_warps=8, dot=True)
