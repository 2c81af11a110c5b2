"""Drafts by the head for multi-token prediction in a Qwen3.5 checkpoint, against its formulas written out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from byte_model import continue_text, save_byte_model
from safetensors.torch import load_file, save_file
from test_hf_generate import prompt
from tiny_models import BACKEND, build
from torch import Tensor

import replayssm
from replayssm import Sampling
from replayssm.hf.mtp import MTPHead
from replayssm.speculative import Draft

transformers.logging.set_verbosity_error()
NEW = 24


def add_head(path: Path, model: Any) -> dict[str, Tensor]:
    """Adds random weights ``mtp.*`` to a saved checkpoint; returns them."""
    gen = torch.Generator().manual_seed(3)
    weights = {
        f"mtp.{name}": torch.randn(x.shape, generator=gen) * (1.5 / x.shape[-1] ** 0.5 if x.dim() > 1 else 0.3)
        for name, x in MTPHead(model).state_dict().items()
    }
    file = path / "model.safetensors"
    save_file(load_file(file) | weights, file, metadata={"format": "pt"})
    return weights


@pytest.fixture(params=["qwen3_5", "qwen3_5_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    model = build(request.param)
    model.save_pretrained(tmp_path)
    return tmp_path, add_head(tmp_path, model)


def load(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight)


def rotate(x: Tensor, theta: float, share: float) -> Tensor:
    """``x [heads, T, D]`` at the positions 0 .. T - 1; the first ``share`` of its channels turns."""
    n = int(x.shape[-1] * share)
    angle = torch.arange(x.shape[1])[:, None] / theta ** (torch.arange(0, n, 2) / n)
    a, b, rest = x[..., : n // 2], x[..., n // 2 : n], x[..., n:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)


@torch.no_grad()
def drafts_ref(model: Any, weights: dict[str, Tensor], text: list[int], n: int) -> list[int]:
    """What the head drafts after ``text``, from scratch and without a cache. Dense layers only."""
    W = {name.removeprefix("mtp."): x for name, x in weights.items()}
    L = {name.removeprefix("layers.0."): x for name, x in W.items()}
    config = model.config
    heads, groups, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rope = config.rope_parameters
    theta, share = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
    hidden = model.model(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0]
    tokens = text[1:]
    drafts: list[int] = []
    for _ in range(n):
        e = norm(model.model.embed_tokens(torch.tensor(tokens)), W["pre_fc_norm_embedding.weight"])
        u = torch.cat([e, norm(hidden, W["pre_fc_norm_hidden.weight"])], -1) @ W["fc.weight"].T
        T = len(tokens)
        x = norm(u, L["input_layernorm.weight"])
        q, gate = (x @ L["self_attn.q_proj.weight"].T).view(T, heads, 2, D).unbind(2)
        k = (x @ L["self_attn.k_proj.weight"].T).view(T, groups, D)
        v = (x @ L["self_attn.v_proj.weight"].T).view(T, groups, D).repeat_interleave(heads // groups, 1)
        q = rotate(norm(q, L["self_attn.q_norm.weight"]).transpose(0, 1), theta, share)
        k = rotate(norm(k, L["self_attn.k_norm.weight"]).transpose(0, 1), theta, share)
        k = k.repeat_interleave(heads // groups, 0)
        scores = (q @ k.transpose(1, 2) * D**-0.5).masked_fill(~torch.ones(T, T).tril().bool(), float("-inf"))
        o = (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1) * gate.sigmoid()
        u = u + o.reshape(T, -1) @ L["self_attn.o_proj.weight"].T
        x = norm(u, L["post_attention_layernorm.weight"])
        up, down = x @ L["mlp.up_proj.weight"].T, L["mlp.down_proj.weight"].T
        g = norm(u + (F.silu(x @ L["mlp.gate_proj.weight"].T) * up) @ down, W["norm.weight"])
        drafts.append(int(model.lm_head(g[-1]).argmax()))
        tokens, hidden = [*tokens, drafts[-1]], torch.cat([hidden, g[-1:]])
    return drafts


class Checked(MTPHead):
    """Its drafts are compared with the reference; what goes on to the model is right for some tokens, so that all kinds
    of acceptance come up."""

    compared = 0

    def propose(self, texts: Sequence[Sequence[int]], most: Sequence[int], sampling: Sampling) -> Draft:
        draft = super().propose(texts, most, sampling)
        rows = []
        for row, (text, n) in enumerate(zip(texts, most, strict=True)):
            assert draft.tokens[row, :n].tolist() == drafts_ref(self.plain, self.weights, list(text), n)
            self.compared += n
            whole = next(x for x in self.whole if x[: len(text)] == list(text))
            right = (self.compared + row) % (n + 1)
            rows.append([t if i < right else (t + 1) % 100 for i, t in enumerate(whole[len(text) :][:n])])
        return Draft.of(rows)


def test_drafts_are_those_of_the_formulas(tmp_path: Path) -> None:
    """In a batch of left-padded prompts, after every number of accepted drafts, while rows end."""
    build("qwen3_5").save_pretrained(tmp_path)
    weights = add_head(tmp_path, build("qwen3_5"))
    model, plain = load(tmp_path), load(tmp_path)
    inputs = prompt(14, 5, 9)
    want = plain.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    ends = [int(want[1, 14 + 9])]
    want = plain.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=ends)
    replayssm.attach(model, backend=BACKEND)
    head = Checked(model)
    head.load_state_dict({name.removeprefix("mtp."): x for name, x in weights.items()})
    pads = (inputs["attention_mask"] == 0).sum(1)
    head.whole = [row[pad:].tolist() for row, pad in zip(want, pads, strict=True)]
    head.plain, head.weights = plain, weights
    out = replayssm.generate(model, **inputs, max_new_tokens=NEW, draft=head, draft_tokens=4, eos_token_id=ends)
    assert torch.equal(out.sequences, want)
    assert min(out.new_tokens) < NEW and 0.2 < out.acceptance < 0.8 and head.compared > 40
    replayssm.detach(model)


def test_greedy_and_sampled(checkpoint: tuple[Path, dict[str, Tensor]]) -> None:
    path, weights = checkpoint
    model = load(path)
    inputs = prompt(14, 5, 9)
    want = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    replayssm.attach(model, backend=BACKEND)
    head = MTPHead.load(model)
    assert all(torch.equal(x, weights[f"mtp.{name}"]) for name, x in head.state_dict().items())
    for draft in ("mtp", head, head, MTPHead.load(model, branches=2)):
        out = replayssm.generate(model, **inputs, max_new_tokens=NEW, draft=draft, draft_tokens=3)
        assert torch.equal(out.sequences, want) and out.drafted > 60
    sampling = Sampling(3.0, generator=torch.Generator().manual_seed(0))
    out = replayssm.generate(model, **inputs, max_new_tokens=NEW, draft=head, draft_tokens=3, sampling=sampling)
    assert 0 < out.accepted < out.drafted
    with pytest.raises(ValueError, match="branches must be a whole number of at least 1; got 0"):
        MTPHead.load(model, branches=0)
    replayssm.detach(model)


def test_what_is_no_head(tmp_path: Path) -> None:
    model = build("qwen3_5")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no weights mtp\.\* in"):
        MTPHead.load(model, tmp_path)
    weights = add_head(tmp_path, model)
    MTPHead.load(model, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": weights["mtp.fc.weight"][:, :5].contiguous()}, file)
    with pytest.raises(ValueError, match=r"not those that are known: fc\.weight"):
        MTPHead.load(model, tmp_path)
    save_file(load_file(file) | {"mtp.layers.1.norm.weight": torch.ones(3)}, file)
    with pytest.raises(ValueError, match=r"not those that are known: layers\.1\.norm\.weight"):
        MTPHead.load(model, tmp_path)
    with pytest.raises(ValueError, match="known for qwen3_5_text, qwen3_5_moe_text; got 'kimi_linear'"):
        MTPHead.load(build("kimi_linear"), tmp_path)
    with pytest.raises(ValueError, match="was not loaded from a directory"):
        MTPHead.load(model)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"the weights in .* cannot be read: "):
        MTPHead.load(model, tmp_path)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_byte_model(tmp_path)
    add_head(tmp_path, load(tmp_path))
    assert continue_text(tmp_path, "--prompt", "ab") == 0
    plain = capsys.readouterr().out
    assert continue_text(tmp_path, "--prompt", "ab", "--draft", "mtp") == 0
    shown = capsys.readouterr()
    assert shown.out == plain and "drafts accepted" in shown.err
