"""A backend for torch.compile that computes all projections of one input as one matrix product.

A mixer projects its input to queries, keys, gates and more, an MLP to two halves; each product of a single token reads
its weights at less than the memory's speed, the less the smaller they are. Here the weights of a group move into one
piece of memory, of which the model's parameters become views, so that no memory is added, and updates in place are
seen. That memory belongs to the parameters alone: nothing here keeps a model, or weights that it has dropped, alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from replayssm.hf.experts import read_in_place

LINEAR: Any = torch._C._nn.linear  # pyright: ignore[reportAttributeAccessIssue]
Names = tuple[str, ...]


class Merging:
    """The backend for ``model``; ``inner`` compiles what it leaves, Inductor by default. compiled: graphs so far;
    in_place: products with an expert that they read in place."""

    def __init__(self, model: torch.nn.Module, inner: Callable[..., Any] | None = None) -> None:
        self._model, self._inner = weakref.ref(model), inner
        self._groups: list[Names] = []  # parameters that lie one behind the other
        self.compiled = self.in_place = 0

    def __call__(self, traced: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        copy = Graph()  # for torch looks into its own again
        copy.output(copy.graph_copy(traced.graph, {}))
        graph = GraphModule(traced, copy)
        nodes = list(graph.graph.nodes)
        holds = dict(zip((node for node in nodes if node.op == "placeholder"), inputs, strict=True))
        known = {id(weight): name for name, weight in self._owner().named_parameters()}
        by_input: dict[Node, list[Node]] = {}
        for node in nodes:
            if node.op == "call_function" and node.target is LINEAR and self._suits(node, holds, known):
                by_input.setdefault(node.args[0], []).append(node)
        products: dict[Names, list[list[Node]]] = {}  # with the same weights, each of another input
        for group in by_input.values():
            names = tuple(known[id(holds[node.args[1]])] for node in group)
            if len(set(names)) == len(group) > 1 and len({holds[node.args[1]].dtype for node in group}) == 1:
                products.setdefault(names, []).append(group)
        held: list[list[int]] = []  # what the graph gets as inputs of its own, behind the model's: of these of them
        place = {node: i for i, node in enumerate(holds)}
        for names, groups in products.items():
            weights = {node.args[1]: None for group in groups for node in group}
            uses = {user for weight in weights for user in weight.users}  # pyright: ignore
            if uses == {node for group in groups for node in group} and self._move(names):
                merged = self._input(graph, f"merged_{len(held)}")
                held.append([place[node.args[1]] for node in groups[0]])
                for group in groups:
                    self._replace(graph, group, merged, [holds[node.args[1]].shape[0] for node in group])
        # The weights themselves are inputs no more: torch took down where they lay before they were moved.
        used = [i for i, node in enumerate(holds) if node.users]
        for node in holds:
            if not node.users:
                graph.graph.erase_node(node)
        self.in_place += read_in_place(graph)
        graph.graph.lint()
        graph.recompile()
        inputs = [*(inputs[i] for i in used), *(_whole([inputs[i] for i in each]) for each in held)]
        if self._inner is not None:
            run = self._inner(graph, inputs)
        else:
            from torch._inductor.compile_fx import compile_fx

            run = compile_fx(graph, inputs)
        self.compiled += 1
        return lambda *args: run(  # pyright: ignore
            *(args[i] for i in used), *(_whole([args[i] for i in each]) for each in held)
        )

    @property
    def groups(self) -> int:
        """How many groups of weights lie together."""
        return len(self._groups)

    @property
    def valid(self) -> bool:
        """Whether all parameters still are where they were put: not those that were replaced rather than changed."""
        return all(map(self._lies, self._groups))

    def undo(self) -> None:
        """Gives each parameter memory of its own again."""
        with torch.no_grad():
            for names in filter(self._lies, self._groups):
                for name in names:
                    weight = self._owner().get_parameter(name)
                    weight.data = weight.data.clone()
        self._groups.clear()

    def _owner(self) -> torch.nn.Module:
        model = self._model()
        assert model is not None, "compiled for a model that is gone"
        return model

    def _lies(self, names: Names) -> bool:
        try:
            return _together([self._owner().get_parameter(name) for name in names])
        except AttributeError:  # a module was put around it, or something else in its place
            return False

    def _suits(self, node: Node, holds: dict[Node, Any], known: dict[int, str]) -> bool:
        """Whether the node is a product with a parameter of the model, without a bias, that may be moved: one that
        another tensor has a part in must stay where it is."""
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        weight: Any = holds.get(node.args[1])  # pyright: ignore
        if bias is not None or id(weight) not in known or not weight.is_contiguous():
            return False
        if type(weight) is not torch.nn.Parameter:  # of a kind whose memory is not a matrix
            return False
        ours = any(known[id(weight)] in names for names in self._groups)
        return ours or weight.untyped_storage().nbytes() == weight.nbytes

    def _move(self, names: Names) -> bool:
        """Moves these weights into one piece of memory; False where one of them is in another already."""
        if names in self._groups:
            return True
        if any(name in other for other in self._groups for name in names):
            return False
        weights = [self._owner().get_parameter(name) for name in names]
        with torch.no_grad():
            merged = torch.cat([weight.data for weight in weights])
            for weight, view in zip(weights, merged.split([w.shape[0] for w in weights]), strict=True):
                weight.data = view
        self._groups.append(names)
        return True

    def _input(self, graph: GraphModule, name: str) -> Node:
        """One more input, behind the others."""
        last = next(node for node in reversed(graph.graph.nodes) if node.op == "placeholder")
        with graph.graph.inserting_after(last):
            return graph.graph.placeholder(name)

    def _replace(self, graph: GraphModule, nodes: list[Node], held: Node, rows: list[int]) -> None:
        """One product for all of these, which have their input in common."""
        with graph.graph.inserting_before(nodes[0]):
            whole = graph.graph.call_function(LINEAR, (nodes[0].args[0], held))
            parts = graph.graph.call_function(torch.split, (whole, rows, -1))
            for i, node in enumerate(nodes):
                node.replace_all_uses_with(graph.graph.call_function(getitem, (parts, i)))
        for node in nodes:
            graph.graph.erase_node(node)


def _together(weights: Sequence[Tensor]) -> bool:
    """Whether these lie one behind the other in one piece of memory."""
    at, piece = weights[0].data_ptr(), weights[0].untyped_storage().data_ptr()
    for weight in weights:
        if weight.data_ptr() != at or weight.untyped_storage().data_ptr() != piece:
            return False
        at += weight.nbytes
    return True


def _whole(weights: Sequence[Tensor]) -> Tensor:
    """The weights of a group as one. They are taken from a graph's arguments, not by name: torch compiles a frame once,
    and where a graph breaks within a layer it comes with the other layers' weights too. Those that were not moved are
    copied."""
    weights = [weight.detach() for weight in weights]
    if not _together(weights):
        return torch.cat(list(weights))
    rows = sum(weight.shape[0] for weight in weights)
    return weights[0].as_strided((rows, weights[0].shape[1]), weights[0].stride())
