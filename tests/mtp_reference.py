"""Heads for multi-token prediction: their weights as checkpoints name them, and their formulas written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EXPERTS: dict[str, Any] = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, moe_latent_size=32, routed_scaling_factor=2.5,
    moe_shared_expert_intermediate_size=40, num_nextn_predict_layers=1, mtp_layers_block_type=["attention", "moe"],
)  # fmt: skip
"""Of a tiny Nemotron-3."""


def shapes(model: Any, stacked: bool = False) -> dict[str, list[int]]:
    """Names and shapes without ``mtp.``; stacked: as in Qwen3.6, all experts in one weight."""
    config = model.config.get_text_config(decoder=True)
    h, D = config.hidden_size, config.head_dim
    Q, G = config.num_attention_heads * D, config.num_key_value_heads * D
    m = getattr(config, "moe_intermediate_size", 0)
    if config.model_type == "nemotron_h":
        E, s, latent = config.n_routed_experts, config.moe_shared_expert_intermediate_size, config.moe_latent_size
        first = {"eh_proj": [h, 2 * h], "enorm": [h], "hnorm": [h], "norm": [h], "mixer.q_proj": [Q, h]}
        first |= {"mixer.k_proj": [G, h], "mixer.v_proj": [G, h], "mixer.o_proj": [h, Q]}
        second = {"norm": [h], "final_layernorm": [h], "mixer.gate": [E, h]}
        second |= {"mixer.shared_experts.up_proj": [s, h], "mixer.shared_experts.down_proj": [h, s]}
        second |= {"mixer.fc1_latent_proj": [latent, h], "mixer.fc2_latent_proj": [h, latent]}
        for i in range(E):
            second |= {f"mixer.experts.{i}.up_proj": [m, latent], f"mixer.experts.{i}.down_proj": [latent, m]}
        found = {f"layers.0.{k}.weight": x for k, x in first.items()}
        found |= {f"layers.1.{k}.weight": x for k, x in second.items()}
        return found | {"layers.1.mixer.gate.e_score_correction_bias": [E]}
    layer = {"input_layernorm": [h], "post_attention_layernorm": [h], "self_attn.q_norm": [D], "self_attn.k_norm": [D]}
    layer |= {"self_attn.q_proj": [2 * Q, h], "self_attn.k_proj": [G, h], "self_attn.v_proj": [G, h]}
    layer |= {"self_attn.o_proj": [h, Q]}

    def mlp(name: str, width: int) -> dict[str, list[int]]:
        return {f"{name}.gate_proj": [width, h], f"{name}.up_proj": [width, h], f"{name}.down_proj": [h, width]}

    E = getattr(config, "num_experts", 0)
    if E:
        layer |= {"mlp.gate": [E, h], "mlp.shared_expert_gate": [1, h]}
        layer |= mlp("mlp.shared_expert", config.shared_expert_intermediate_size)
        for i in range(0 if stacked else E):
            layer |= mlp(f"mlp.experts.{i}", m)
    else:
        layer |= mlp("mlp", config.intermediate_size)
    found = {f"layers.0.{k}.weight": x for k, x in layer.items()}
    if E and stacked:
        found |= {"layers.0.mlp.experts.gate_up_proj": [E, 2 * m, h], "layers.0.mlp.experts.down_proj": [E, h, m]}
    found |= {f"{k}.weight": [h] for k in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    return found | {"fc.weight": [h, 2 * h]}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight)


def rotate(x: Tensor, theta: float, share: float) -> Tensor:
    """``x [heads, T, D]`` at the positions 0 .. T - 1; the first ``share`` of its channels turns."""
    n = int(x.shape[-1] * share)
    angle = torch.arange(x.shape[1])[:, None] / theta ** (torch.arange(0, n, 2) / n).to(x.dtype)
    a, b, rest = x[..., : n // 2], x[..., n // 2 : n], x[..., n:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``q [heads, T, D]``, ``k, v [groups, T, D] -> [T, heads, D]``, causal."""
    T, repeat = q.shape[1], q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    hidden = ~torch.ones(T, T).tril().bool()
    scores = (q @ k.transpose(1, 2) * q.shape[2] ** -0.5).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def routed(x: Tensor, share: Tensor, expert: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Sum over the experts of a row of ``x``, weighed by ``share [T, experts]``; zero: not chosen."""
    rows = [sum(share[t, i] * expert(x[t], i) for i in share[t].nonzero()[:, 0].tolist()) for t in range(len(x))]
    return torch.stack(rows)  # pyright: ignore[reportArgumentType]


def chosen(score: Tensor, by: Tensor, n: int) -> Tensor:
    """``score``, of which only the ``n`` with the highest ``by`` stay; they add up to 1."""
    kept = torch.zeros_like(score).scatter(1, by.topk(n).indices, 1.0) * score
    return kept / kept.sum(1, keepdim=True)


def qwen(config: Any, W: dict[str, Tensor], e: Tensor, hidden: Tensor) -> Tensor:
    """``g [T, hidden]`` of the tokens' embeddings ``e`` and the decoder's outputs before each, from position 0 on."""
    L = {name.removeprefix("layers.0.").removesuffix(".weight"): x for name, x in W.items()}
    heads, D, T = config.num_attention_heads, config.head_dim, len(e)
    rope = config.rope_parameters
    theta, share = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
    u = torch.cat([norm(e, L["pre_fc_norm_embedding"]), norm(hidden, L["pre_fc_norm_hidden"])], -1) @ L["fc"].T
    x = norm(u, L["input_layernorm"])
    q, gate = (x @ L["self_attn.q_proj"].T).view(T, heads, 2, D).unbind(2)
    k, v = ((x @ L[f"self_attn.{name}_proj"].T).view(T, -1, D) for name in "kv")
    q = rotate(norm(q, L["self_attn.q_norm"]).transpose(0, 1), theta, share)
    k = rotate(norm(k, L["self_attn.k_norm"]).transpose(0, 1), theta, share)
    o = attend(q, k, v.transpose(0, 1)) * gate.sigmoid()
    u = u + o.reshape(T, -1) @ L["self_attn.o_proj"].T
    x = norm(u, L["post_attention_layernorm"])

    def mlp(x: Tensor, name: str) -> Tensor:
        gate, up, down = (L[f"{name}.{part}_proj"] for part in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def expert(x: Tensor, i: int) -> Tensor:
        if "mlp.experts.gate_up_proj" not in L:
            return mlp(x, f"mlp.experts.{i}")
        gate, up = (L["mlp.experts.gate_up_proj"][i] @ x).chunk(2)
        return L["mlp.experts.down_proj"][i] @ (F.silu(gate) * up)

    if "mlp.gate" in L:
        p = (x @ L["mlp.gate"].T).softmax(-1)
        y = routed(x, chosen(p, p, config.num_experts_per_tok), expert)
        y = y + (x @ L["mlp.shared_expert_gate"].T).sigmoid() * mlp(x, "mlp.shared_expert")
    else:
        y = mlp(x, "mlp")
    return norm(u + y, L["norm"])


def nemotron(config: Any, W: dict[str, Tensor], e: Tensor, hidden: Tensor) -> Tensor:
    """See :func:`qwen`."""
    W = {name.removesuffix(".weight"): x for name, x in W.items()}
    heads, D, T, eps = config.num_attention_heads, config.head_dim, len(e), config.layer_norm_epsilon
    A, M = "layers.0", "layers.1"

    def rms(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * W[name]

    u = torch.cat([rms(e, f"{A}.enorm"), rms(hidden, f"{A}.hnorm")], -1) @ W[f"{A}.eh_proj"].T
    x = rms(u, f"{A}.norm")
    q, k, v = ((x @ W[f"{A}.mixer.{name}_proj"].T).view(T, -1, D).transpose(0, 1) for name in "qkv")
    u = u + attend(q, k, v).reshape(T, heads * D) @ W[f"{A}.mixer.o_proj"].T
    x = rms(u, f"{M}.norm")

    def mlp(x: Tensor, name: str) -> Tensor:
        return (x @ W[f"{M}.mixer.{name}.up_proj"].T).relu().pow(2) @ W[f"{M}.mixer.{name}.down_proj"].T

    p = (x @ W[f"{M}.mixer.gate"].T).sigmoid()
    share = chosen(p, p + W[f"{M}.mixer.gate.e_score_correction_bias"], config.num_experts_per_tok)
    share = share * config.routed_scaling_factor
    y = routed(x @ W[f"{M}.mixer.fc1_latent_proj"].T, share, lambda x, i: mlp(x, f"experts.{i}"))
    y = y @ W[f"{M}.mixer.fc2_latent_proj"].T + mlp(x, "shared_experts")
    return rms(u + y, f"{M}.final_layernorm")


@torch.no_grad()
def head_ref(model: Any, weights: dict[str, Tensor], tokens: Tensor, hidden: Tensor) -> Tensor:
    """``g [T, hidden]`` in the dtype of ``hidden [T, hidden]``."""
    config = model.config.get_text_config(decoder=True)
    W = {name.removeprefix("mtp."): x.to(hidden.dtype) for name, x in weights.items()}
    e = model.get_input_embeddings()(tokens).to(hidden.dtype)
    return (nemotron if config.model_type == "nemotron_h" else qwen)(config, W, e, hidden)


@torch.no_grad()
def drafts_ref(model: Any, weights: dict[str, Tensor], text: list[int], n: int) -> list[int]:
    """What the head drafts after ``text``, from scratch and without a cache."""
    hidden = model.get_decoder()(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0]
    tokens = text[1:]
    drafts: list[int] = []
    for _ in range(n):
        g = head_ref(model, weights, torch.tensor(tokens), hidden)
        drafts.append(int(model.get_output_embeddings()(g[-1]).argmax()))
        tokens, hidden = [*tokens, drafts[-1]], torch.cat([hidden, g[-1:]])
    return drafts
