"""A backend for torch.compile that computes all projections of one input as one matrix product.

A mixer projects its input to queries, keys, gates and more, an MLP to two halves; each product of a single token reads
its weights at less than the memory's speed, the less the smaller they are. Here the weights of a group move into one
tensor, of which the model's parameters become views, so that no memory is added, and updates in place are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

LINEAR: Any = torch._C._nn.linear  # pyright: ignore[reportAttributeAccessIssue]


class Merging:
    """The backend for ``model``; ``inner`` compiles what it leaves, Inductor by default."""

    def __init__(self, model: torch.nn.Module, inner: Callable[..., Any] | None = None) -> None:
        self._model, self._inner = model, inner
        self._names = {id(weight): name for name, weight in model.named_parameters()}
        self._groups: dict[tuple[str, ...], Tensor] = {}  # names of parameters, and where they are

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        holds = dict(zip((n for n in graph.graph.nodes if n.op == "placeholder"), inputs, strict=True))
        by_input: dict[Node, list[Node]] = {}
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target is LINEAR and self._suits(node, holds):
                by_input.setdefault(node.args[0], []).append(node)
        for nodes in by_input.values():
            kinds = {holds[node.args[1]].dtype for node in nodes}
            if len(nodes) > 1 and len(kinds) == 1:
                self._merge(graph, nodes, [holds[node.args[1]] for node in nodes])
        graph.graph.lint()
        graph.recompile()
        if self._inner is not None:
            return self._inner(graph, inputs)
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, list(inputs))  # pyright: ignore[reportReturnType]

    @property
    def valid(self) -> bool:
        """Whether all parameters still are where they were put: not those that were replaced rather than changed."""
        for names, merged in self._groups.items():
            at = merged.data_ptr()
            for weight in map(self._model.get_parameter, names):
                if weight.data_ptr() != at:
                    return False
                at += weight.nbytes
        return True

    def _suits(self, node: Node, holds: dict[Node, Any]) -> bool:
        """Whether the node is a product with a parameter of the model, without a bias."""
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        weight: Any = holds.get(node.args[1])  # pyright: ignore
        return bias is None and id(weight) in self._names and weight.is_contiguous()

    def _merge(self, graph: GraphModule, nodes: list[Node], weights: list[Tensor]) -> None:
        names, rows = tuple(self._names[id(weight)] for weight in weights), [weight.shape[0] for weight in weights]
        if names not in self._groups:
            if any(name in other for other in self._groups for name in names):
                return  # a weight that is in another group already
            with torch.no_grad():
                merged = self._groups[names] = torch.cat(list(weights))
                for weight, view in zip(weights, merged.split(rows), strict=True):
                    weight.data = view
        held = f"merged_{list(self._groups).index(names)}"
        if not hasattr(graph, held):
            graph.register_buffer(held, self._groups[names])
        with graph.graph.inserting_before(nodes[0]):
            whole = graph.graph.call_function(LINEAR, (nodes[0].args[0], graph.graph.get_attr(held)))
            parts = graph.graph.call_function(torch.split, (whole, rows, -1))
            for i, node in enumerate(nodes):
                node.replace_all_uses_with(graph.graph.call_function(getitem, (parts, i)))
        for node in nodes:
            graph.graph.erase_node(node)
