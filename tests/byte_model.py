"""A small random byte-level model on disk, for tests of the command line."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from replayssm.cli import main


def save_byte_model(path: Path, vocab_size: int = 256) -> Path:
    """Saves a Gated DeltaNet model whose greedy text varies; returns the path."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"], num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=8,
        bos_token_id=0, eos_token_id=None, pad_token_id=255, initializer_range=0.4,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def copy_checkpoint(checkpoint: Path, to: Path) -> Path:
    """The same files in another directory; returns that."""
    for file in checkpoint.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def continue_text(path: Path, *more: str) -> int:
    """``replayssm generate`` of 20 tokens; its exit code."""
    return main(["generate", "--model", str(path), "--max-new-tokens", "20", *more])
