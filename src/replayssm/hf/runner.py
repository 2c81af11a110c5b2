"""A model and its cache as a batch of texts that grow and shrink one by one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from replayssm.hf.ragged import RaggedCache, keep_whole, take_columns_back
from replayssm.hf.trees import ancestors, attention_mask, check_trees, order_attention

CACHE_NAMES = ("cache", "past_key_values", "cache_params")


class Runner:
    """Feeds tokens to ``model``: an attached one, or one with attention only, that needs no attaching.

    window: the most tokens of a :meth:`step`. back: how many tokens can be taken back beyond those of the last step.
    pads: columns of padding before each row's first token, int64 ``[B]``, and columns: of the cache; both on the host.
    hidden: set to an empty list, it gathers the decoder's outputs ``[.., hidden]`` of each row's tokens that stay.
    Raises ValueError for a model with recurrent layers that is not attached, or one that is no causal language model.
    """

    def __init__(self, model: PreTrainedModel, window: int, back: int = 0) -> None:
        if not model.can_generate() or model.config.is_encoder_decoder:
            raise ValueError(
                f"{type(model).__name__} is no causal language model: expected one with a decoder only and logits"
            )
        self.model, self.window = model, window
        self._parameters = inspect.signature(type(model).forward).parameters
        self._cache_name = next((name for name in CACHE_NAMES if name in self._parameters), "")
        if not self._cache_name:
            raise ValueError(f"{type(model).__name__} takes no cache; it cannot be decoded step by step")
        if getattr(model, "_replayssm", None) is not None:
            self.cache: Any = RaggedCache(model, window, back)
        else:
            self.cache = DynamicCache(config=model.config)
            if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.cache.layers):
                raise ValueError(
                    f"{type(model).__name__} has recurrent layers and is not attached; call replayssm.attach(model)"
                )
        keep_whole(self.cache)
        self.pads = torch.zeros(0, dtype=torch.long)
        self.columns = 0
        self.hidden: list[Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Where tokens go."""
        return self.model.get_input_embeddings().weight.device  # pyright: ignore

    def prefill(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Feeds the first tokens of all rows, at least one each; returns the logits ``[B, vocabulary]`` after these."""
        T = max(map(len, texts))
        self.pads = torch.tensor([T - len(text) for text in texts])
        tokens = torch.tensor([[0] * (T - len(text)) + list(text) for text in texts], device=self.device)
        logits = self._forward(tokens, *self._chain(tokens), logits_to_keep=1)[:, -1]
        if isinstance(
            self.cache, RaggedCache
        ):  # from here on a token is a draft, which models treat as they do one token
            self.cache.activate_past_recording()
        return logits

    def step(self, tokens: Tensor, real: Sequence[int] | None = None) -> Tensor:
        """Feeds ``tokens [B, T <= window]``; returns the logits ``[B, T, vocabulary]`` after each. real: how many of
        them are any in each row; what fills it up behind these gets no later position, which a model may not have."""
        return self._forward(tokens.to(self.device), *self._chain(tokens, real))

    def step_tree(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """:meth:`step` of trees: ``parents`` int64 ``[B, T]`` on the CPU, as in :func:`replayssm.tree.verify_tree`.
        :meth:`take_path` must follow. Raises ValueError for models that trees do not suit: :func:`check_trees`."""
        check_trees(self.model)
        if tokens.shape[1] > self.window or not self.columns:
            raise ValueError(
                f"step_tree: a tree of {tokens.shape[1]} tokens after {self.columns}; it must fit into the window of "
                f"{self.window} and come after a prompt"
            )
        visible = ancestors(parents)
        columns = torch.arange(self.columns) >= self.pads[:, None]
        mask = torch.cat([columns[:, None].expand(-1, tokens.shape[1], -1), visible], 2)
        depth = visible.sum(2) - 1
        mask = attention_mask(mask, self.model.dtype).to(self.device)
        positions = (self.columns - self.pads[:, None] + depth).to(self.device)
        recurrent = self.cache.recurrent if isinstance(self.cache, RaggedCache) else None
        if recurrent is None or tokens.shape[1] == 1:
            return self._forward(tokens.to(self.device), mask, positions)
        recurrent.parents = parents
        try:
            return self._forward(tokens.to(self.device), mask, positions)
        finally:
            recurrent.parents = None

    def take_path(self, paths: Sequence[Sequence[int]], T: int) -> None:
        """Of the last step's ``T`` tokens row ``b`` keeps ``paths[b]``, ascending; the others are taken back."""
        source = torch.arange(T).repeat(len(paths), 1)
        for row, path in enumerate(paths):
            source[row, : len(path)] = torch.tensor(path, dtype=torch.long)
        if not torch.equal(source, torch.arange(T).expand_as(source)):
            if isinstance(self.cache, RaggedCache):
                self.cache.recurrent.take_path(source)
            order_attention(self.cache, self.columns - T, source)
        self.take_back([T - len(path) for path in paths])

    def feed(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Feeds each row its own tokens, at least one; returns the logits ``[B, vocabulary]`` after the last."""
        if self.columns == 0:
            return self.prefill(texts)
        last: list[Any] = [None] * len(texts)
        for start in range(0, max(map(len, texts)), self.window):
            parts = [text[start : start + self.window] for text in texts]
            T = max(map(len, parts))
            # What fills a row up is taken back at once.
            filled = torch.tensor([[*part, *[0] * (T - len(part))] for part in parts])
            logits = self.step(filled, [len(part) for part in parts])
            self.take_back([T - len(part) for part in parts])
            for row, part in enumerate(parts):
                if part:
                    last[row] = logits[row, len(part) - 1]
        return torch.stack(last)

    def take_back(self, n: Sequence[int]) -> None:
        """Takes back the last ``n[b]`` tokens of each row."""
        back = torch.tensor(n, dtype=torch.long)
        if not back.any():
            return
        if isinstance(self.cache, RaggedCache):
            self.cache.recurrent.take_back(back)
        if self.hidden is not None:
            self.hidden = [x[: len(x) - m] for x, m in zip(self.hidden, n, strict=True)]
        self._resize(*take_columns_back(self.cache, self.columns, self.pads, back))

    def select(self, rows: Sequence[int]) -> None:
        """Goes on with these rows only."""
        index = torch.tensor(rows)
        self.cache.batch_select_indices(index)
        if self.hidden is not None:
            self.hidden = [self.hidden[row] for row in rows]
        pads = self.pads[index]
        self._resize(*take_columns_back(self.cache, self.columns, pads, torch.zeros_like(pads)))

    def _resize(self, columns: int, pads: Tensor) -> None:
        self.columns, self.pads = columns, pads
        if isinstance(self.cache, RaggedCache):
            self.cache.recurrent.tokens = columns

    def _chain(self, tokens: Tensor, real: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Mask and positions of tokens that follow one another."""
        at = torch.arange(self.columns + tokens.shape[1]) - self.pads[:, None]
        positions = at[:, self.columns :]
        if real is not None:
            positions = torch.minimum(positions, positions[:, :1] + torch.tensor(real)[:, None] - 1)
        return (at >= 0).long().to(self.device), positions.clamp(min=0).to(self.device)

    def _forward(self, tokens: Tensor, mask: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
        kwargs |= {"attention_mask": mask, "position_ids": positions, self._cache_name: self.cache}
        accepted = {name: x for name, x in kwargs.items() if name in self._parameters}
        seen: list[Any] = []
        handle = None
        if self.hidden is not None:
            handle = self.model.get_decoder().register_forward_hook(lambda module, args, out: seen.append(out))
        try:
            with torch.no_grad():
                logits = self.model(tokens, use_cache=True, **accepted).logits
        finally:
            if handle is not None:
                handle.remove()
        if self.hidden is not None:
            first = (self.pads - self.columns).clamp(min=0).tolist()
            new = [x[n:] for x, n in zip(seen[0].last_hidden_state, first, strict=True)]
            self.hidden = [torch.cat(pair) for pair in zip(self.hidden, new, strict=True)] if self.hidden else new
        self.columns += tokens.shape[1]
        return logits
