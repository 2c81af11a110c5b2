"""Drafts by the heads for multi-token prediction in checkpoints, against their formulas written out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from byte_model import continue_text, save_byte_model
from mtp_reference import EXPERTS, drafts_ref, head_ref, shapes
from safetensors.torch import load_file, save_file
from test_hf_generate import prompt
from tiny_models import BACKEND, assert_as_exact, build
from torch import Tensor

import replayssm
from replayssm import Sampling
from replayssm.hf.mtp import MTPHead
from replayssm.speculative import Draft

transformers.logging.set_verbosity_error()
NEW = 24


CASES = ("qwen3_5", "qwen3_5_moe", "qwen3_6_moe", "qwen3_next", "nemotron_h")
"""qwen3_6_moe: the same model as qwen3_5_moe, with the experts stacked in the checkpoint."""


def tiny(case: str) -> Any:
    return build(case.replace("3_6", "3_5"), **(EXPERTS if case == "nemotron_h" else {}))


def add_head(path: Path, model: Any, stacked: bool = False) -> dict[str, Tensor]:
    """Adds random weights ``mtp.*`` to a saved checkpoint; returns them."""
    gen = torch.Generator().manual_seed(3)
    weights = {
        f"mtp.{name}": torch.randn(shape, generator=gen) * (1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.3)
        for name, shape in shapes(model, stacked).items()
    }
    write(path, weights)
    return weights


def write(path: Path, weights: dict[str, Tensor], without: Sequence[str] = ()) -> None:
    """Adds weights to those of a checkpoint, or takes some away."""
    file = path / "model.safetensors"
    kept = {name: x for name, x in load_file(file).items() if name not in without}
    save_file(kept | weights, file, metadata={"format": "pt"})


@pytest.fixture(params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    model = tiny(request.param)
    model.save_pretrained(tmp_path)
    return tmp_path, add_head(tmp_path, model, stacked=request.param == "qwen3_6_moe")


def load(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


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


def test_outputs_are_those_of_the_formulas(checkpoint: tuple[Path, dict[str, Tensor]]) -> None:
    """As exact as the formulas in the same dtype, and the same where tokens come in several steps."""
    path, weights = checkpoint
    model = load(path)
    head = MTPHead.load(model)
    gen = torch.Generator().manual_seed(1)
    tokens, h = torch.randint(0, 128, (2, 7), generator=gen), torch.randn(2, 7, 64, generator=gen)
    head.pads = torch.zeros(2, dtype=torch.long)
    ours = torch.cat([head._feed(tokens[:, part], h[:, part]) for part in (slice(4), slice(4, 5), slice(5, 7))], 1)
    stock, wide = (
        torch.stack([head_ref(model, weights, *row) for row in zip(tokens, x, strict=True)]) for x in (h, h.double())
    )
    assert_as_exact(ours, stock, wide)


def test_drafts_are_those_of_the_formulas(checkpoint: tuple[Path, dict[str, Tensor]]) -> None:
    """In a batch of left-padded prompts, after every number of accepted drafts, while rows end."""
    path, weights = checkpoint
    model, plain = load(path), load(path)
    inputs = prompt(14, 5, 9)
    want = plain.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    ends = [int(want[1, 14 + 9])]
    want = plain.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=ends)
    replayssm.attach(model, backend=BACKEND)
    head = Checked(model)
    head.load_state_dict(MTPHead.load(model).state_dict())
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
    own = {f"mtp.{name}": x for name, x in head.state_dict().items()}
    assert all(torch.equal(own[name], x) for name, x in weights.items() if ".experts." not in name or x.dim() == 3)
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
    add_head(tmp_path, model)
    MTPHead.load(model, tmp_path)
    valid = "qwen3_5_text, qwen3_5_moe_text, qwen3_next, nemotron_h"
    with pytest.raises(ValueError, match=f"known for {valid}; got 'kimi_linear'"):
        MTPHead.load(build("kimi_linear"), tmp_path)
    with pytest.raises(ValueError, match=r"must be full_attention, moe, mlp; mtp_layers_block_type is \['linear_att"):
        MTPHead(build("nemotron_h", mtp_layers_block_type=["mamba", "moe"]))
    with pytest.raises(ValueError, match="was not loaded from a directory"):
        MTPHead.load(model)
    with pytest.raises(ValueError, match=r"Qwen/Qwen3\.5-4B is not a directory"):
        MTPHead.load(model, "Qwen/Qwen3.5-4B")
    with pytest.raises(ValueError, match="whole number of at least 1; got True"):
        MTPHead(model, branches=True)
    index = tmp_path / "model.safetensors.index.json"
    for broken in ("[]", "null", '{"weight_map": []}'):
        index.write_text(broken)
        with pytest.raises(ValueError, match="cannot be read: "):
            MTPHead.load(model, tmp_path)
    index.unlink()
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "mtp.fc.weight": torch.ones(64, 128, dtype=torch.int8)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"quantised heads are not known; mtp\.fc\.weight in .* is torch\.int8"):
        MTPHead.load(model, tmp_path)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"the weights in .* cannot be read: "):
        MTPHead.load(model, tmp_path)


def test_weights_that_are_not_known(checkpoint: tuple[Path, dict[str, Tensor]]) -> None:
    """Each is named as it is in the checkpoint."""
    path, weights = checkpoint
    model = load(path)
    fc = next(name for name, x in weights.items() if list(x.shape) == [64, 128])
    last = [name for name in weights if "down_proj" in name and "shared" not in name][-1]
    for name in (fc, last):
        short, x = re.escape(name.removeprefix("mtp.")), weights[name]
        write(path, {name: x[..., :5].contiguous()})
        wrong, right = re.escape(str([*x.shape[:-1], 5])), re.escape(str(list(x.shape)))
        with pytest.raises(ValueError, match=f"not those that are known: {short} is {wrong}, not {right}$"):
            MTPHead.load(model)
        write(path, {}, without=[name])
        if weights[name].dim() == 3:  # then the experts are expected one by one
            short = r"layers\.0\.mlp\.experts\.0\.down_proj\.weight"
        with pytest.raises(ValueError, match=f"not those that are known: {short} is missing"):
            MTPHead.load(model)
        write(path, {name: x, "mtp.layers.7.norm.weight": torch.ones(3)})
        with pytest.raises(ValueError, match=r"not those that are known: layers\.7\.norm\.weight is unknown$"):
            MTPHead.load(model)
        write(path, {}, without=["mtp.layers.7.norm.weight"])
    write(path, {f"mtp.layers.7.{i}": torch.ones(3) for i in range(10)})
    with pytest.raises(ValueError, match=r"7\.0 is unknown, .* layers\.7\.7 is unknown and 2 more$"):
        MTPHead.load(model)


def test_routers_stay_exact_in_bfloat16(tmp_path: Path) -> None:
    """Nemotron's, as in its decoder; the other weights have the model's dtype."""
    model = tiny("nemotron_h")
    model.save_pretrained(tmp_path)
    weights = add_head(tmp_path, model)
    state = MTPHead.load(model.bfloat16(), tmp_path).state_dict()
    exact = {name for name, x in state.items() if x.dtype == torch.float32}
    assert exact == {"layers.1.mixer.gate.weight", "layers.1.mixer.gate.e_score_correction_bias"}
    assert all(torch.equal(state[name], weights[f"mtp.{name}"]) for name in exact)
    assert {x.dtype for name, x in state.items() if name not in exact} == {torch.bfloat16}


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_byte_model(tmp_path)
    add_head(tmp_path, load(tmp_path))
    assert continue_text(tmp_path, "--prompt", "ab") == 0
    plain = capsys.readouterr().out
    assert continue_text(tmp_path, "--prompt", "ab", "--draft", "mtp") == 0
    shown = capsys.readouterr()
    assert shown.out == plain and "drafts accepted" in shown.err
