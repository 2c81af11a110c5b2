"""What :func:`replayssm.generate` is called with: checked, and brought into one form."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayssm.speculative import Sampling

NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1, "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "guidance_scale": 1,
    "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "sequence_bias": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "watermarking_config": None, "stop_strings": None,
}  # fmt: skip
"""Settings of a generation configuration that change greedy text of ``model.generate``, and the values that do not."""


def check_options(model: Any, sampling: Any, on_tokens: Any) -> None:
    """Raises ValueError for what is not a model, a sampling or a function, and for what only model.generate does."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"generate: model must be a transformers PreTrainedModel; got {type(model).__name__}")
    if not isinstance(sampling, Sampling):
        raise ValueError(f"generate: sampling must be a replayssm.Sampling or None; got {sampling!r}")
    if on_tokens is not None and not callable(on_tokens):
        raise ValueError(f"generate: on_tokens must be a function or None; got {on_tokens!r}")
    config: Any = getattr(model, "generation_config", None)
    asked = {name: getattr(config, name, None) for name in NEUTRAL}
    asked = {name: value for name, value in asked.items() if value is not None and value != NEUTRAL[name]}
    if asked:
        settings = ", ".join(f"{name}={value}" for name, value in asked.items())
        raise ValueError(
            f"generate: model.generation_config asks for {settings}, "
            "which is done by model.generate only; set it to None to go without"
        )


def whole(what: str, value: Any) -> int:
    """``value`` as an int of at least 1; numpy's and one-element tensors are as good."""
    number = None
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        number = operator.index(value)
    if number is None or number < 1:
        raise ValueError(f"generate: {what} a whole number of at least 1; got {value!r}")
    return number


def prompts(input_ids: Any, attention_mask: Any, vocabulary: int) -> list[list[int]]:
    """The rows' tokens without their padding."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.long, torch.int):
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"generate: input_ids must be an int64 tensor; got {got}")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"generate: input_ids must be [B, T], with at least one token; got {tuple(input_ids.shape)}")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if getattr(attention_mask, "shape", None) != input_ids.shape:
        shape = getattr(attention_mask, "shape", None)
        raise ValueError(
            f"generate: attention_mask must be like input_ids, {tuple(input_ids.shape)}; got "
            f"{type(attention_mask).__name__ if shape is None else tuple(shape)}"
        )
    real = torch.as_tensor(attention_mask, device=input_ids.device).bool()
    if not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError("generate: padding must be on the left of every prompt, as its last tokens are continued")
    if bool((((input_ids < 0) | (input_ids >= vocabulary)) & real).any()):
        least, most = int(input_ids[real].min()), int(input_ids[real].max())
        raise ValueError(f"generate: input_ids must be in [0, {vocabulary}), the vocabulary; got {least} .. {most}")
    return [row[mask].tolist() for row, mask in zip(input_ids, real, strict=True)]


def ends(model: PreTrainedModel, eos_token_id: Any) -> list[int]:
    """The tokens that end a row: those given, in any form, or else the model's own."""
    given = config_token(model, "eos_token_id") if eos_token_id is None else eos_token_id
    given = () if given is None else given.tolist() if hasattr(given, "tolist") else given  # torch's and numpy's
    try:
        return [operator.index(end) for end in (given if isinstance(given, Iterable) else [given])]
    except TypeError:
        raise ValueError(f"generate: eos_token_id must be a token or several; got {eos_token_id!r}") from None


def config_token(model: PreTrainedModel, name: str) -> Any:
    """A token of the model's generation configuration, or else of its text configuration."""
    value = getattr(getattr(model, "generation_config", None), name, None)
    return value if value is not None else getattr(model.config.get_text_config(decoder=True), name, None)
