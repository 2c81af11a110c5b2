"""Fixtures: every backend, every recurrence. A new backend is tested by registering it in ``replayssm.backends``."""

from __future__ import annotations

import pytest
import torch
from harness import Where

from replayssm import GDN, KDA, MAMBA2, Recurrence
from replayssm.backends import names

torch.set_num_threads(1)  # tensors this small only lose by threads

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
WHERE = [Where(name, device) for name in names() for device in DEVICES]
FOURTH = Recurrence(decay="channel", erase=False)  # in no model so far; a backend may refuse it, torch may not


@pytest.fixture(params=WHERE, ids=str)
def where(request: pytest.FixtureRequest) -> Where:
    """A backend and a device; its pools skip the test where the backend refuses the layer."""
    return request.param


@pytest.fixture(params=[MAMBA2, GDN, KDA, FOURTH], ids=["mamba2", "gdn", "kda", "fourth"])
def recurrence(request: pytest.FixtureRequest) -> Recurrence:
    return request.param
