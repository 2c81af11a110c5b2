"""Tiny random models of every type that replayssm.attach supports, with weights rescaled so that greedy text varies."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import transformers as hf
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from replayssm.hf.trees import SPARSE

BACKEND = os.environ.get("REPLAYSSM_TEST_BACKEND", "auto")
VOCAB = 128
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
BASE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None, max_position_embeddings=4096,
)  # fmt: skip
GDN: dict[str, Any] = dict(
    head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4
)
MOE: dict[str, Any] = dict(
    moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2
)
MAMBA: dict[str, Any] = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=16, mamba_chunk_size=16)
MLA: dict[str, Any] = dict(num_key_value_heads=4, moe_intermediate_size=32, kv_lora_rank=16, v_head_dim=16)


def _qwen3_5(**kw: Any) -> Any:
    return hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**BASE | GDN | dict(layer_types=LAYERS) | kw))


def _qwen3_5_moe(**kw: Any) -> Any:
    return hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**BASE | GDN | MOE | dict(layer_types=LAYERS) | kw))


def _qwen3_next(**kw: Any) -> Any:
    return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**BASE | GDN | MOE | dict(layer_types=LAYERS) | kw))


def _qwen4_exp(**kw: Any) -> Any:
    config = hf.Qwen4ExpTextConfig(
        **BASE | GDN | MOE
        | dict(
            eos_token_id=2, layer_types=[x.replace("full", "indexed") for x in LAYERS],
            hc_count=2, hc_lowrank=16, ple_layer_ids=[1, 4], ple_embed_dim=32, heads_per_ngram=2,
            ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=1, indexer_n_heads=2,
            indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=4096, indexer_compress_ratio=4,
        )
        | kw
    )  # fmt: skip
    return hf.Qwen4ExpForCausalLM(config)


def _olmo_hybrid(**kw: Any) -> Any:
    config = hf.OlmoHybridConfig(
        **BASE
        | dict(
            num_key_value_heads=4, layer_types=LAYERS, linear_num_key_heads=4, linear_num_value_heads=4,
            linear_key_head_dim=12, linear_value_head_dim=24,
        )
        | kw
    )  # fmt: skip
    return hf.OlmoHybridForCausalLM(config)


def _lara_mini(**kw: Any) -> Any:
    layers = ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]
    config = hf.LaraMiniConfig(**BASE | GDN | MOE | dict(layer_types=layers, sliding_window=24) | kw)
    return hf.LaraMiniForCausalLM(config)


def _kimi_linear(**kw: Any) -> Any:
    config = hf.KimiLinearConfig(
        **BASE | MLA
        | dict(
            layer_types=LAYERS, qk_rope_head_dim=8, qk_nope_head_dim=8, num_local_experts=4, num_experts_per_tok=2,
            linear_head_dim=16, linear_num_heads=4,
        )
        | kw
    )  # fmt: skip
    return hf.KimiLinearForCausalLM(config)


def _glm5_next(**kw: Any) -> Any:
    text = hf.Glm5NextTextConfig(
        **BASE | MLA
        | dict(
            q_lora_rank=16, qk_nope_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, index_topk=4096,
            index_head_dim=16, index_n_heads=2, index_kpool=4, linear_head_dim=16, linear_num_heads=4,
            mlp_layer_types=["dense", "dense", "dense", "sparse"],
        )
        | kw
    )  # fmt: skip
    vision = dict(
        depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=64, projection_intermediate_size=32
    )
    tokens = ("image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id",
              "video_start_token_id", "video_end_token_id")  # fmt: skip
    config = hf.Glm5NextConfig(text_config=text, vision_config=vision, **{t: 120 + i for i, t in enumerate(tokens)})
    return hf.Glm5NextForConditionalGeneration(config)


def _bailing_hybrid(**kw: Any) -> Any:
    config = hf.BailingHybridConfig(
        **BASE | MLA
        | dict(
            layer_types=LAYERS, head_dim=16, qk_rope_head_dim=8, qk_nope_head_dim=8, num_local_experts=4,
            num_experts_per_tok=2, n_group=1, topk_group=1,
        )
        | kw
    )  # fmt: skip
    return hf.BailingHybridForCausalLM(config)


def _mamba2(**kw: Any) -> Any:
    config = hf.Mamba2Config(
        **dict(
            vocab_size=VOCAB, hidden_size=64, num_heads=8, head_dim=16, state_size=16, num_hidden_layers=3, n_groups=2,
            chunk_size=16, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        )
        | kw
    )  # fmt: skip
    return hf.Mamba2ForCausalLM(config)


def _nemotron_h(**kw: Any) -> Any:
    base = {name: value for name, value in BASE.items() if name != "num_hidden_layers"}
    config = hf.NemotronHConfig(
        **base
        | dict(
            head_dim=16, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
            ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, chunk_size=16,
        )
        | kw
    )  # fmt: skip
    return hf.NemotronHForCausalLM(config)


def _bamba(**kw: Any) -> Any:
    return hf.BambaForCausalLM(hf.BambaConfig(**BASE | MAMBA | dict(attn_layer_indices=[2]) | kw))


def _falcon_h1(**kw: Any) -> Any:
    return hf.FalconH1ForCausalLM(hf.FalconH1Config(**BASE | MAMBA | dict(mamba_d_ssm=128) | kw))


def _granitemoehybrid(**kw: Any) -> Any:
    config = hf.GraniteMoeHybridConfig(
        **BASE | MAMBA | dict(layer_types=LAYERS, shared_intermediate_size=64, num_local_experts=4) | kw
    )
    return hf.GraniteMoeHybridForCausalLM(config)


def _zamba2(**kw: Any) -> Any:
    config = hf.Zamba2Config(
        **dict(
            vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4,
            layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"], mamba_d_state=16,
            n_mamba_heads=8, mamba_ngroups=2, chunk_size=16, num_attention_heads=4, num_mem_blocks=1, adapter_rank=8,
            intermediate_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        )
        | kw
    )  # fmt: skip
    return hf.Zamba2ForCausalLM(config)


BUILDERS = {
    name: globals()[f"_{name}"]
    for name in (
        "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "olmo_hybrid", "lara_mini", "kimi_linear", "glm5_next",
        "bailing_hybrid", "mamba2", "nemotron_h", "bamba", "falcon_h1", "granitemoehybrid", "zamba2",
    )
}  # fmt: skip
CHAINS_ONLY = [name for name in BUILDERS if {name, f"{name}_text"} & {*SPARSE}]
"""Neither trees nor fixed memory for drafts."""


def build(name: str, seed: int = 5, **config: Any) -> Any:
    """A model of this type on the CPU, in evaluation mode; ``config`` overrides its tiny configuration."""
    torch.manual_seed(seed)
    model = BUILDERS[name](**config).eval()
    gen = torch.Generator().manual_seed(seed)
    for key, p in model.named_parameters():
        if p.dim() >= 2:
            scale = 0.5 if "conv" in key else 1.6 / p.shape[-1] ** 0.5
            p.data = torch.randn(p.shape, generator=gen) * scale
        elif "dt_bias" in key:
            p.data = torch.randn(p.shape, generator=gen) * 0.5 - 1
        elif "A_log" in key:
            p.data = torch.rand(p.shape, generator=gen) * 3 - 3  # a memory of some to some hundred tokens
    return model


class Wide(TorchFunctionMode):
    """Runs transformers' code in float64 throughout: its casts to float32 become casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def swap(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*tree_map(swap, args), **tree_map(swap, kwargs or {}))


@torch.no_grad()
def truth(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[B, T, vocabulary]`` of a float64 copy of the model on whole sequences."""
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")  # the grouped one has no float64
    with Wide():
        return wide(ids, use_cache=False).logits


def rms(x: torch.Tensor) -> float:
    """Root mean square."""
    return float(x.double().pow(2).mean().sqrt())


def assert_as_exact(ours: torch.Tensor, stock: torch.Tensor, wide: torch.Tensor) -> None:
    """The design's rule: error against float64 at most twice stock's, plus one rounding of the largest logit."""
    floor = torch.finfo(torch.float32).eps * float(wide.abs().max())
    mine, theirs = rms(ours - wide), rms(stock - wide)
    assert mine <= 2 * theirs + floor, f"error {mine:.3g} where stock has {theirs:.3g} (floor {floor:.3g})"


def assert_same_tokens(ours: Any, stock: Any) -> None:
    """Equal sequences of two ``generate`` calls with scores; else says where they part, and by which gap of logits."""
    a, b = ours.sequences, stock.sequences
    if torch.equal(a, b):
        return
    assert a.shape == b.shape, f"expected shape {tuple(b.shape)}; got {tuple(a.shape)}"
    row, position = (int(i) for i in (a != b).nonzero()[0])
    step = position - (b.shape[1] - len(stock.scores))
    top = stock.scores[step][row].topk(2)
    off = (ours.scores[step][row] - stock.scores[step][row]).abs()
    gap, off = float(top.values[0] - top.values[1]), float(off[off.isfinite()].max())
    raise AssertionError(
        f"row {row} parts at new token {step}: stock's gap is {gap:.3g}, the logits are {off:.3g} apart"
    )
