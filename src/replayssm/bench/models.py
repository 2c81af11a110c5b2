"""Models of real size with random weights: speed does not depend on what weights say.

Sizes are of the public configurations (hub pages of the models). ``tiny-...``: small enough for a CPU and for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

_hf: Any = transformers  # whose configurations' parameters are not typed for what is passed on here


def _qwen3_5(layers: int | None, **sizes: Any) -> Any:
    n = layers or sizes["num_hidden_layers"]
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(n)]
    return _hf.Qwen3_5TextConfig(
        **sizes | dict(num_hidden_layers=n),
        layer_types=kinds,
        tie_word_embeddings=True,
    )


def _nemotron_h(layers: int | None, pattern: str, **sizes: Any) -> Any:
    kinds = [{"M": "mamba", "-": "mlp", "*": "attention"}[x] for x in pattern[:layers]]
    return _hf.NemotronHConfig(num_hidden_layers=len(kinds), layers_block_type=kinds, **sizes)


def _kimi_linear(layers: int | None, **sizes: Any) -> Any:
    n = layers or 8
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(n)]
    return _hf.KimiLinearConfig(num_hidden_layers=n, layer_types=kinds, **sizes)


CONFIGS: dict[str, Callable[[int | None], Any]] = {
    "qwen3.5-4b": lambda layers: _qwen3_5(
        layers, num_hidden_layers=32, vocab_size=248320, hidden_size=2560, intermediate_size=9216,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
    ),
    # 21 Mamba-2, 4 attention, 17 MLP layers
    "nemotron-3-nano-4b": lambda layers: _nemotron_h(
        layers, "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-MMMM", vocab_size=131072, hidden_size=3136,
        intermediate_size=12544, num_attention_heads=40, num_key_value_heads=8, head_dim=128, mamba_num_heads=96,
        mamba_head_dim=80, ssm_state_size=128, n_groups=8,
    ),
    "kimi-linear-48b-a3b": lambda layers: _kimi_linear(layers),  # 8 of its 27 layers unless more are asked for
    "tiny-gdn": lambda layers: _qwen3_5(
        layers, num_hidden_layers=4, vocab_size=128, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "tiny-mamba2": lambda layers: _nemotron_h(
        layers, "M-M*M-", vocab_size=128, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2,
        chunk_size=16,
    ),
}  # fmt: skip
"""By name, the configuration of as many layers as are asked for, or all."""


def build(name: str, layers: int | None, dtype: torch.dtype, device: torch.device) -> Any:
    """The model ``name`` of :data:`CONFIGS`; its weights are random, in ``dtype``."""
    config = CONFIGS[name](layers)
    config.eos_token_id = None  # texts go on to the end
    config.pad_token_id = 0
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model.eval()
