"""Experts of few tokens, as a compiled step has them, without copies of their weights.

For its steps generate takes each token's experts out of the weights, a copy, and multiplies those. Of few tokens it
stays at that, but the product is written as a sum, so that the compiler reads the weights in place as it adds up
(:func:`read_in_place`). More tokens are grouped by expert, as in a prompt (:func:`grouped_experts`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FEW_ROUTED = 4
"""Tokens of a step, of all texts together, up to which each token's experts are read on their own."""


@contextmanager
def grouped_experts(model: PreTrainedModel, inputs: dict[str, Any]) -> Iterator[None]:
    """Inside, a step of more than FEW_ROUTED tokens groups them by expert, where ``model`` does so in its prompt."""
    now, changed = model.get_experts_implementation(), grouped(model, inputs)
    if not changed:
        yield
        return
    model.set_experts_implementation(now | changed)
    try:
        yield
    finally:
        model.set_experts_implementation(now)


def grouped(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, str]:
    """What :func:`grouped_experts` sets for a step with these inputs: kinds of experts, by their place in the model."""
    now, asked = model.get_experts_implementation(), inputs["cache"].experts
    if not _groups(model) or inputs["input_ids"].numel() <= FEW_ROUTED:
        return {}
    return {key: kind for key, kind in asked.items() if kind == "grouped_mm" and now.get(key) == "batched_mm"}


def _groups(model: PreTrainedModel) -> bool:
    """Whether torch's grouped product keeps to the device: of bfloat16, on NVIDIA's Hopper and data center Blackwell.
    Elsewhere it reads the groups' sizes, which no graph can."""
    if model.device.type != "cuda" or torch.version.cuda is None or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    return model.dtype == torch.bfloat16 and torch.cuda.get_device_capability(model.device)[0] in (9, 10)


def read_in_place(graph: GraphModule) -> int:
    """Writes products of a vector with a matrix that an index picked from an input, ``bmm(weights[ids], x)``, as sums;
    how many there were."""
    found = 0
    for node in list(graph.graph.nodes):
        plain = node.op == "call_function" and node.target is torch.bmm and len(node.args) == 2 and not node.kwargs
        if plain and any(map(_picked, node.args)):
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.call_function(_product, node.args))
            graph.graph.erase_node(node)
            found += 1
    return found


def _picked(node: Any) -> bool:
    """Whether these are weights at an index of the graph's own."""
    if not isinstance(node, Node) or node.op != "call_function" or node.target is not getitem:
        return False
    weights, index = node.args
    return isinstance(weights, Node) and weights.op == "placeholder" and isinstance(index, Node)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of batches of matrices; a sum, in float32, where one of them is a vector."""
    if (a.shape[1] != 1 and b.shape[2] != 1) or a.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return torch.bmm(a, b)
    if a.shape[1] == 1:
        return (_kept(a).mT.float() * b.float()).sum(1, keepdim=True).to(a.dtype)
    return (a.float() * _kept(b).mT.float()).sum(2, keepdim=True).to(a.dtype)


def _kept(x: Tensor) -> Tensor:
    """``x`` in memory: Inductor, which would else compute it again for each row of the matrix, stops at its strides."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride(), x.storage_offset())
