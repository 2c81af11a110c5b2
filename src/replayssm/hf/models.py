"""The model types of transformers that :func:`replayssm.attach` supports: where their code is, and what it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replayssm.recurrence import GDN, KDA, MAMBA2, Recurrence


@dataclass(frozen=True)
class ModelType:
    """package: in ``transformers.models``."""

    recurrence: Recurrence
    package: str

    @property
    def module(self) -> str:
        """Module whose globals the mixers call."""
        return f"transformers.models.{self.package}.modeling_{self.package}"


SUPPORTED: Mapping[str, ModelType] = {
    "qwen3_5_text": ModelType(GDN, "qwen3_5"),
    "qwen3_5_moe_text": ModelType(GDN, "qwen3_5_moe"),
    "qwen3_next": ModelType(GDN, "qwen3_next"),
    "qwen4_exp_text": ModelType(GDN, "qwen4_exp"),
    "olmo_hybrid": ModelType(GDN, "olmo_hybrid"),
    "lara_mini": ModelType(GDN, "lara_mini"),
    "kimi_linear": ModelType(KDA, "kimi_linear"),
    "glm5_next_text": ModelType(KDA, "glm5_next"),
    "bailing_hybrid": ModelType(KDA, "bailing_hybrid"),
    "mamba2": ModelType(MAMBA2, "mamba2"),
    "nemotron_h": ModelType(MAMBA2, "nemotron_h"),
    "bamba": ModelType(MAMBA2, "bamba"),
    "falcon_h1": ModelType(MAMBA2, "falcon_h1"),
    "granitemoehybrid": ModelType(MAMBA2, "granitemoehybrid"),
    "zamba2": ModelType(MAMBA2, "zamba2"),
}
"""By ``model_type`` of the text configuration, so that models with vision or audio around these are found too."""


def lookup(config: Any) -> ModelType:
    """The entry of a model's configuration; raises ValueError with the supported types."""
    kind = config.get_text_config(decoder=True).model_type
    if kind not in SUPPORTED:
        raise ValueError(f"attach: unsupported model type {kind!r}; supported: {', '.join(SUPPORTED)}")
    return SUPPORTED[kind]
