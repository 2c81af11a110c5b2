"""What a forward over draft trees needs of a transformers model beside its recurrent layers: a mask by ancestors."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

SPARSE = ("glm5_next_text", "qwen4_exp_text", "lara_mini")
"""Model types whose attention counts columns (sliding, pools of keys), or that have convolutions of their own."""


def check_trees(model: PreTrainedModel) -> None:
    """Raises ValueError where a tree cannot be verified in one forward of ``model``."""
    config = model.config.get_text_config(decoder=True)
    attached = getattr(model, "_replayssm", None) is not None
    if getattr(config, "alibi", False) or not (
        attached or "position_ids" in inspect.signature(type(model).forward).parameters
    ):
        raise ValueError(
            f"replayssm: draft trees are not supported for {config.model_type}: it takes no positions; draft chains"
        )
    if config.model_type in SPARSE or getattr(config, "sliding_window", None):
        raise ValueError(
            f"replayssm: draft trees are not supported for {config.model_type}: its attention goes by columns, and a "
            "tree's neighbours are no neighbours in the text; draft chains"
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"replayssm: draft trees need attention that takes a mask, sdpa or eager; got {config._attn_implementation}"
        )


def ancestors(parents: Tensor) -> Tensor:
    """``parents [B, T] -> [B, T, T]``: whether (t, j) has j as t itself or an ancestor of it."""
    B, T = parents.shape
    row, see = torch.arange(B), torch.zeros(B, T, T, dtype=torch.bool)
    for t in range(T):
        see[:, t] = see[row, parents[:, t].clamp(min=0)] & (parents[:, t] >= 0)[:, None]
        see[:, t, t] = True
    return see


def attention_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask ``[B, 1, T, columns]`` of ``visible [B, T, columns]``, which models take as it is."""
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill(~visible, torch.finfo(dtype).min)[:, None]


def order_attention(cache: Cache, start: int, source: Tensor) -> None:
    """From column ``start`` on, column ``i`` of row ``b`` becomes what ``source[b, i]`` was."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            extra: Any = layer
            for name in ("keys", "values"):
                x = getattr(extra, name)
                new = x[:, :, start:]
                index = source.to(x.device)[:, None, :, None].expand_as(new)
                setattr(extra, name, torch.cat([x[:, :, :start], new.gather(2, index)], 2))
