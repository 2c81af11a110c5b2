"""Attention of few tokens, as a captured step has it, in batched products over all query heads that share a key.

Multi-head latent attention (MLA) caches one small vector ``c`` a token, of which stock makes all heads' keys ``U c``
and values ``W c`` again at every step. But ``q . U c = (U^T q) . c`` and ``sum_i p_i W c_i = W sum_i p_i c_i``, so here
the queries go down to the latents, and one vector a head comes back up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "replayssm_grouped"
FEW = 16
"""Tokens of a step up to which attention goes by batched products."""


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, a model that uses torch's attention runs :func:`attend`. Stock repeats all keys and values for each query
    head of their group when it is compiled, and so moves them several times. It is set for the time of a call only:
    what is compiled asks for it, and generate's masks do not."""
    config: Any = model.config.get_text_config(decoder=True)
    if config._attn_implementation != "sdpa":
        yield
        return
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    latent = latent_layers(model)
    try:
        config._attn_implementation_internal = NAME  # of this one only, not of what is nested in it
        for module in latent:
            module.__dict__["expand_kv"] = _as_cached  # in place of the class's
        yield
    finally:
        for module in latent:
            module.__dict__.pop("expand_kv", None)
        config._attn_implementation_internal = "sdpa"


def latent_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that attend to their latents: of a model that uses torch's attention, see :func:`_keeps_latents`."""
    config: Any = model.config.get_text_config(decoder=True)
    if config._attn_implementation != "sdpa":
        return []
    return [module for module in model.modules() if _keeps_latents(module, config)]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of few tokens ``query [B, heads, T, dim]``: the query heads that share a key are taken as that many
    tokens more, with scores in float32. With so few rows that is faster than torch's fused kernels, which are made for
    many (docs/log.md). Of MLA, key and value are the two parts of the latents. Anything else goes to stock's."""
    latent = getattr(module, "expand_kv", None) is _as_cached
    T, dim = query.shape[2:]
    own_heads = attention_mask is not None and attention_mask.shape[1] != 1
    odd = dropout or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None
    causal = T > 1 and attention_mask is None
    if T > FEW or own_heads or odd or causal:
        if latent:
            key, value = type(module).expand_kv(module, key, value)  # pyright: ignore[reportAttributeAccessIssue]
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    scale = dim**-0.5 if scaling is None else scaling
    if not latent:
        out = _attend([(query, key)], value, attention_mask, scale)
    else:
        turned = value.shape[3]  # of a query's and a key's numbers the last, which carry the position
        up: Tensor = module.kv_b_proj.weight.view(query.shape[1], -1, key.shape[3])  # pyright: ignore
        down = _by_head(query[..., : dim - turned], up[:, : dim - turned])
        out = _attend([(down, key), (query[..., dim - turned :], value)], key, attention_mask, scale)
        out = _by_head(out, up[:, dim - turned :].transpose(1, 2))
    return out.transpose(1, 2).contiguous(), None


def _attend(parts: list[tuple[Tensor, Tensor]], value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """``[B, heads, T, dim of values]``; parts: queries and keys, whose scores are added up."""
    B, heads, T, _ = parts[0][0].shape
    shared = value.shape[1]
    groups = heads // shared
    products = [
        _product(q.reshape(B * shared, groups * T, q.shape[3]), k.flatten(0, 1).transpose(1, 2)) for q, k in parts
    ]
    scores = sum(products[1:], products[0]).view(B, shared, groups, T, -1) * scale
    mask = None if mask is None else mask[:, :, None]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1).to(value.dtype).view(B * shared, groups * T, -1)
    return torch.bmm(weights, value.flatten(0, 1)).view(B, heads, T, value.shape[3])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of batches of matrices, not rounded to 16 bits."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a, b, out_dtype=torch.float32)  # pyright: ignore[reportCallIssue]
    return torch.bmm(a, b)


def _by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """``x [B, heads, T, N]`` times a matrix a head, ``[heads, N, M]``."""
    B, heads, T, N = x.shape
    out = torch.bmm(x.transpose(0, 1).reshape(heads, B * T, N), matrices)
    return out.view(heads, B, T, -1).transpose(0, 1)


def _as_cached(latents: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """In place of a module's ``expand_kv``, which expands them."""
    return latents, turned


def _keeps_latents(module: torch.nn.Module, config: Any) -> bool:
    """Whether ``module`` is an MLA as transformers has it, of ``config``, and projects latents by a plain matrix: no
    adapter, hook, bias, or weight of a kind that products alone can read."""
    expand: Any = getattr(type(module), "expand_kv", None)
    own = "expand_kv" in module.__dict__ or getattr(module, "config", None) is not config
    if own or not getattr(expand, "__module__", "").startswith("transformers.models."):
        return False
    matrix: Any = getattr(module, "kv_b_proj", None)
    if type(matrix) is not torch.nn.Linear or type(matrix.weight) is not torch.nn.Parameter or matrix.bias is not None:
        return False
    return not (matrix._forward_hooks or matrix._forward_pre_hooks or "forward" in matrix.__dict__)
