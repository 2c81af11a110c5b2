"""What runs on a GPU, on torch's device without memory: whoever mixes devices, or reads a number that the device has,
is caught here, on a machine without a GPU. Nothing is computed, so nothing is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
import transformers.masking_utils
from tiny_models import BUILDERS, CHAINS_ONLY, build
from torch import Tensor

import replayssm
from replayssm import LayerSpec, Recurrence, Sampling, StatePool, library, ops
from replayssm.hf.drafters import DraftModel
from replayssm.hf.mtp import LAYOUTS, MTPHead
from replayssm.hf.static import StaticReplayCache
from replayssm.testing import make_inputs
from replayssm.tree import commit_path, extend_tree, verify_tree

transformers.logging.set_verbosity_error()

SELECTING = ("qwen4_exp", "glm5_next")  # stock's own code for them reads numbers


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """``meta``; a layer's step is what its declaration to torch says, and stock does not look at its masks."""
    monkeypatch.setattr(library, "run", lambda *step: library.traced(*step[:7]))  # of a tree as of a chain
    monkeypatch.setattr(transformers.masking_utils, "_ignore_causal_mask_sdpa", lambda *args, **kwargs: False)
    monkeypatch.setattr(transformers.masking_utils, "is_tracing", lambda *args: True)
    return "meta"


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host asks in so many words, it is told zeros."""
    to, as_bool, cpu, as_list = Tensor.to, Tensor.__bool__, Tensor.cpu, Tensor.tolist

    def moved(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = kwargs.get("device", args[0] if args else None)
        return _zeros(x) if x.is_meta and str(target) == "cpu" else to(x, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", moved)
    monkeypatch.setattr(Tensor, "__bool__", lambda x: False if x.is_meta else as_bool(x))
    monkeypatch.setattr(Tensor, "cpu", lambda x: _zeros(x) if x.is_meta else cpu(x))
    monkeypatch.setattr(Tensor, "tolist", lambda x: as_list(_zeros(x) if x.is_meta else x))


@pytest.fixture
def attached() -> Iterator[Callable[[str], Any]]:
    """Attaches models of a type; detaches them at the end."""
    models: list[Any] = []

    def attach(name: str) -> Any:
        models.append(replayssm.attach(build(name).to("meta", torch.bfloat16)))
        return models[-1]

    yield attach
    for model in models:
        replayssm.detach(model)


def test_the_core_reads_nothing(recurrence: Recurrence) -> None:
    spec = LayerSpec(recurrence, H=2, HV=4, K=16, V=8)
    pool = StatePool(6, fold_every=4, window=3, device="meta", backend="torch")
    layer, conv = pool.add_layer(spec), pool.add_conv(5)
    slots, n = torch.tensor([4, -1, 2], dtype=torch.int32, device="meta"), torch.ones(3, device="meta").int()

    def inputs(T: int) -> list[Tensor]:
        return [x.to("meta") for x in make_inputs(recurrence, 3, T, 2, 4, 16, 8, torch.bfloat16)]

    pool.reset(slots)
    ops.seed(layer, torch.zeros(3, 4, 8, 16, device="meta"), slots)
    for T in (1, 3):
        assert ops.verify(layer, *inputs(T), slots=slots, backend="torch").is_meta
        conv.extend(torch.zeros(3, 5, T, device="meta"), slots)
        pool.commit(slots, n)
    parents = torch.zeros(3, 3, dtype=torch.long, device="meta")
    verify_tree(layer, *inputs(3), parents, slots=slots)
    extend_tree(conv, torch.zeros(3, 5, 3, device="meta"), parents, slots)
    commit_path(pool.layers, parents, n, slots, pool.convs)
    pool.copy(slots, slots)
    ops.rewind(pool.layers, slots, n)
    pool.fold(slots, n)
    ops.fold(pool.layers, slots, backend="torch")


@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in SELECTING])
def test_a_static_step_reads_nothing(name: str, device: str, attached: Callable[[str], Any]) -> None:
    model = attached(name)
    cache = StaticReplayCache(model, 64)
    with torch.no_grad():
        for T in (6, 1, 1):
            out = model(torch.zeros(3, T, dtype=torch.long, device=device), cache=cache, use_cache=True)
    assert out.logits.is_meta


@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in SELECTING])
@pytest.mark.usefixtures("device", "readable")
def test_drafts(name: str, attached: Callable[[str], Any]) -> None:
    """Every kind of draft, with memory that moves and with fixed memory: the host asks only where it says so."""
    model, other = attached(name), attached(name)
    kinds: list[dict[str, Any]] = [dict(draft="prompt-lookup"), dict(draft=other, sampling=Sampling(0.8))]
    if name not in CHAINS_ONLY:
        kinds += [kind | dict(static=True) for kind in kinds]
        kinds += [dict(draft="prompt-tree"), dict(draft=DraftModel(other, branches=2))]
    if model.config.get_text_config().model_type in LAYOUTS:
        kinds += [dict(draft=MTPHead(model)), dict(draft=MTPHead(model, branches=2))]
    ids = torch.tensor([[5, 6, 7, 5, 6, 7], [9, 8, 9, 8, 9, 8]])
    for kind in kinds:
        out = replayssm.generate(model, ids, max_new_tokens=4, draft_tokens=3, eos_token_id=(), **kind)
        assert out.sequences.shape == (2, 10), kind
