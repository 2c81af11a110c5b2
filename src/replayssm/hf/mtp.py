"""Drafts from the head for multi-token prediction that a checkpoint of the model brings along and transformers drops.

For a text ``x`` whose token ``t`` left the decoder, its last norm included, as ``h_t``::

    u_t = fc([norm_embedding(embed(x_{t+1})), norm_hidden(h_t)])
    g_t = norm(layers(u_0 .. u_t))          layers of the model with a cache of their own; u_t has the position t
    x_{t+2} ~ lm_head(g_t)                  and from there on with g_t in place of h_{t+1}

Qwen3.5 and Qwen3-Next have one layer, attention with an MLP or experts; Nemotron-3 has two, attention without positions
and experts. Experts are stacked in a checkpoint (Qwen3.6) or one by one (Qwen3.5, Qwen3-Next, Nemotron-3).

Where the facts are from; none of the code: vllm-project/vllm, vllm/model_executor/models/ qwen3_next_mtp.py,
qwen3_5_mtp.py, nemotron_h_mtp.py; sgl-project/sglang, python/sglang/srt/models/nemotron_h_mtp.py; NVIDIA/Megatron-LM,
megatron/core/transformer/multi_token_prediction.py; NVIDIA-NeMo/Automodel,
nemo_automodel/components/models/common/mtp/mtp.py; ISEEKYAN/mbridge, pull request 145 (experts of Qwen3.5 and 3.6).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from replayssm.hf.ragged import take_columns_back
from replayssm.hf.trees import attention_mask
from replayssm.speculative import Draft, Sampling, Tree

if TYPE_CHECKING:
    from replayssm.hf.runner import Runner


@dataclass(frozen=True)
class Layout:
    """What differs by model type. norm_embedding, norm_hidden, fc, norm: what the checkpoint calls these parts of the
    formulas, after ``mtp.``; ``{last}`` is the number of the last layer. final: the decoder's last norm; eps: of the
    norms, and kinds: of the layers, are names in the configuration; no kinds: one layer of attention."""

    norm_embedding: str = "pre_fc_norm_embedding"
    norm_hidden: str = "pre_fc_norm_hidden"
    fc: str = "fc"
    norm: str = "norm"
    final: str = "norm"
    eps: str = "rms_norm_eps"
    kinds: str | None = None


QWEN = Layout()
NEMOTRON = Layout(
    norm_embedding="layers.0.enorm", norm_hidden="layers.0.hnorm", fc="layers.0.eh_proj",
    norm="layers.{last}.final_layernorm", final="norm_f", eps="layer_norm_epsilon", kinds="mtp_layers_block_type",
)  # fmt: skip

LAYOUTS: Mapping[str, Layout] = {
    "qwen3_5_text": QWEN, "qwen3_5_moe_text": QWEN, "qwen3_next": QWEN, "nemotron_h": NEMOTRON,
}  # fmt: skip
"""By ``model_type`` of the text configuration."""

KINDS = ("full_attention", "moe", "mlp")
"""Layers that a head may have: what they keep of a token can be taken back."""

SHOWN = 8
"""How many weights an error names."""


class MTPHead(nn.Module):
    """A :class:`replayssm.speculative.Drafter` for ``model``, whose embedding, rotary positions and output layer it
    shares. Its weights are named as in the checkpoint, without ``mtp.``, and stacked where they are of experts. One
    call of ``generate`` at a time. branches: as of :class:`replayssm.hf.drafters.DraftModel`. Raises ValueError for
    models of other types, and for heads with recurrent layers."""

    def __init__(self, model: PreTrainedModel, branches: int = 1) -> None:
        super().__init__()
        if type(branches) is not int or branches < 1:
            raise ValueError(f"MTPHead: branches must be a whole number of at least 1; got {branches!r}")
        self.branches = branches
        config = copy.deepcopy(model.config.get_text_config(decoder=True))
        if config.model_type not in LAYOUTS:
            raise ValueError(f"MTPHead: known for {', '.join(LAYOUTS)}; got {config.model_type!r}")
        layout = LAYOUTS[config.model_type]
        kinds = list(getattr(config, layout.kinds)) if layout.kinds else ["full_attention"]
        if not kinds or not set(kinds) <= set(KINDS):
            raise ValueError(f"MTPHead: the layers of a head must be {', '.join(KINDS)}; {layout.kinds} is {kinds}")
        decoder: Any = model.get_decoder()
        config.layer_types, config.num_hidden_layers = kinds, len(kinds)
        self.layers = nn.ModuleList(type(decoder.layers[0])(config, i) for i in range(len(kinds)))
        layout = self._layout = replace(layout, norm=layout.norm.format(last=len(kinds) - 1))
        final, width = getattr(decoder, layout.final), config.hidden_size
        for path in (layout.norm_embedding, layout.norm_hidden, layout.norm):
            self._place(path, type(final)(width, eps=getattr(config, layout.eps)))
        self._place(layout.fc, nn.Linear(2 * width, width, bias=False))
        self._model, self._config = [model], config  # in a list, so that its weights are not ours
        self.runner: Runner | None = None
        self._restart()
        self.to(final.weight.device, final.weight.dtype).eval()
        # What the model keeps in float32, which routers of experts need, stays so here.
        exact = [f".{name}." for name in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
        for name, x in (*self.named_parameters(), *self.named_buffers()):
            if any(part in f".{name}." for part in exact):
                x.data = x.data.to(torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    def load(model: PreTrainedModel, path: str | Path | None = None, branches: int = 1) -> MTPHead:
        """The head in the directory ``path``, by default the one that the model was loaded from. Raises ValueError
        where there is none, or one whose weights are not those that are known, with their names in the checkpoint."""
        head = MTPHead(model, branches)
        place = path or model.config._name_or_path
        if not place:
            raise ValueError("MTPHead: the model was not loaded from a directory; MTPHead.load(model, path) names one")
        directory = Path(place)
        if not directory.is_dir():
            raise ValueError(f"MTPHead: {directory} is not a directory; MTPHead.load(model, path) names one")
        try:
            found = _read(directory)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise ValueError(f"MTPHead: the weights in {directory} cannot be read: {error}") from None
        if not found:
            raise ValueError(f"MTPHead: no weights mtp.* in {directory}")
        narrow = [name for name, x in found.items() if not x.is_floating_point() or x.element_size() < 2]
        if narrow:
            raise ValueError(
                f"MTPHead: quantised heads are not known; mtp.{narrow[0]} in {directory} is {found[narrow[0]].dtype}"
            )
        own = {name: x.shape for name, x in head.state_dict().items()}
        single = {name: _experts(name, shape) for name, shape in own.items() if name not in found}
        wrong = _differences(own, single, found)
        if wrong:
            more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise ValueError(
                f"MTPHead: the weights in {directory} are not those that are known: {', '.join(wrong[:SHOWN])}{more}"
            )
        for name, experts in single.items():
            found[name] = torch.stack([torch.cat([found.pop(part) for part in expert]) for expert in experts])
        head.load_state_dict(found)
        return head

    def watch(self, runner: Runner) -> None:
        """Drafts for the texts of this runner from now on, which must not have begun."""
        self.runner, runner.hidden = runner, []
        self._restart()

    def propose(self, texts: Sequence[Sequence[int]], most: Sequence[int], sampling: Sampling) -> Draft | Tree:
        """See :class:`replayssm.speculative.Drafter`."""
        most = [-(-n // self.branches) for n in most]  # places
        assert self.runner is not None and self.runner.hidden is not None
        lengths = torch.tensor(most)
        if max(most) == 0:
            return Draft(torch.zeros(len(texts), 0, dtype=torch.long), lengths)
        if self._guessed:  # their hidden states were the head's own; now the model's are there
            self._take_back(torch.full((len(texts),), self._guessed))
            self._guessed = 0
        hidden, self.runner.hidden = self.runner.hidden, [x[:0] for x in self.runner.hidden]
        g = self._catch_up(texts, hidden)
        tokens, probs, guesses = [], [], []
        for step in range(max(most)):
            if step:
                g = self._feed(tokens[-1][:, None], g[:, None])[:, 0]
                self._guessed += 1
            logits = self._model[0].get_output_embeddings()(g)  # pyright: ignore[reportOptionalCall]
            if self.branches > 1:
                guesses.append(logits.topk(self.branches).indices)
                tokens.append(guesses[-1][:, 0])
                continue
            if not sampling.greedy:
                probs.append(sampling.probs(logits))
            tokens.append(sampling.draw(probs[-1]) if probs else logits.argmax(-1))
        if guesses:
            return Tree.comb(torch.stack(guesses, 1))
        return Draft(torch.stack(tokens, 1), lengths, torch.stack(probs, 1) if probs else None)

    def select(self, rows: Sequence[int]) -> None:
        """See :class:`replayssm.speculative.Drafter`."""
        if not rows:
            self._restart()
        elif self.columns:
            index = torch.tensor(rows)
            self.cache.batch_select_indices(index)
            self.pads = self.pads[index]
            self._take_back(torch.zeros_like(self.pads))

    def _place(self, path: str, module: nn.Module) -> None:
        """Makes ``module`` the one of that name, within a layer too, so that weights need no renaming."""
        parent, _, name = path.rpartition(".")
        self.get_submodule(parent).add_module(name, module)

    def _restart(self) -> None:
        self.cache = DynamicCache(config=self._config)
        self.pads, self.columns, self._guessed = torch.zeros(0, dtype=torch.long), 0, 0

    def _take_back(self, n: Tensor) -> None:
        self.columns, self.pads = take_columns_back(self.cache, self.columns, self.pads, n)

    @torch.no_grad()
    def _catch_up(self, texts: Sequence[Sequence[int]], hidden: Sequence[Tensor]) -> Tensor:
        """Feeds the decoder's new outputs, each with the token after it; returns ``g [B, hidden]`` of the last."""
        n = torch.tensor([len(x) for x in hidden])
        M, first = int(n.max()), self.columns == 0
        device = hidden[0].device
        tokens = torch.zeros(len(texts), M, dtype=torch.long, device=device)
        h = torch.zeros(len(texts), M, hidden[0].shape[1], dtype=hidden[0].dtype, device=device)
        for row, (text, x) in enumerate(zip(texts, hidden, strict=True)):
            place = slice(M - len(x), M) if first else slice(len(x))
            tokens[row, place] = torch.tensor(text[len(text) - len(x) :], device=device)
            h[row, place] = x
        if first:  # padding on the left stays, on the right it is taken back at once
            self.pads = M - n
        g = self._feed(tokens, h)
        if first:
            return g[:, -1]
        self._take_back(M - n)
        return g[torch.arange(len(texts)), n - 1]

    @torch.no_grad()
    def _feed(self, tokens: Tensor, h: Tensor) -> Tensor:
        """``g [B, T, hidden]`` of tokens ``[B, T]`` and the outputs ``h [B, T, hidden]`` before each."""
        model, T = self._model[0], tokens.shape[1]
        decoder: Any = model.get_decoder()
        embedded = model.get_input_embeddings()(tokens)  # pyright: ignore[reportCallIssue]
        parts = (self._layout.norm_embedding, self._layout.norm_hidden, self._layout.fc, self._layout.norm)
        norm_embedding, norm_hidden, fc, norm = (self.get_submodule(path) for path in parts)
        x = fc(torch.cat([norm_embedding(embedded), norm_hidden(h)], -1))
        columns = torch.arange(self.columns + T)
        own = columns[self.columns :]
        visible = (columns >= self.pads[:, None, None]) & (columns <= own[:, None])
        kwargs = {"attention_mask": attention_mask(visible, x.dtype).to(x.device), "cache": self.cache}
        if hasattr(decoder, "rotary_emb"):
            positions = (own - self.pads[:, None]).clamp(min=0).to(x.device)
            kwargs["position_embeddings"] = decoder.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, **kwargs)
        self.columns += T
        return norm(x)


def _experts(name: str, shape: Sequence[int]) -> list[list[str]]:
    """By expert, the weights ``[out, in]`` that a checkpoint may have in place of the stacked ``name [experts, out,
    in]``, of which several follow one another along ``out``; none for a weight that is no stack of experts."""
    match = re.fullmatch(r"(.+\.experts)\.(gate_up|up|down)_proj", name)
    if match is None:
        return []
    parts = ("gate", "up") if match[2] == "gate_up" else (match[2],)
    return [[f"{match[1]}.{i}.{part}_proj.weight" for part in parts] for i in range(shape[0])]


def _differences(
    own: Mapping[str, Sequence[int]], single: Mapping[str, list[list[str]]], found: Mapping[str, Tensor]
) -> list[str]:
    """What is missing, surplus or of another shape among the weights ``found`` in a checkpoint. own: shapes as in the
    head; single: of those that are not there under their name, the experts one by one."""
    known: dict[str, list[int]] = {}
    for name, shape in own.items():
        for expert in single.get(name, []):
            known |= {part: [shape[1] // len(expert), *shape[2:]] for part in expert}
        if not single.get(name):
            known[name] = list(shape)
    wrong = [f"{name} is {'missing' if name in known else 'unknown'}" for name in sorted(known.keys() ^ found.keys())]
    shapes = {name: list(x.shape) for name, x in found.items() if name in known}
    return wrong + [f"{name} is {x}, not {known[name]}" for name, x in shapes.items() if x != known[name]]


def _read(path: Path) -> dict[str, Tensor]:
    """Weights ``mtp.*`` of a checkpoint directory, without that prefix."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text("utf-8"))["weight_map"]
        files = sorted({file for name, file in names.items() if name.startswith("mtp.")})
    else:
        files = [file.name for file in sorted(path.glob("*.safetensors"))]
    found = {}
    for file in files:
        with safe_open(path / file, framework="pt") as opened:
            mine = [name for name in opened.keys() if name.startswith("mtp.")]  # noqa: SIM118 (no dictionary)
            found |= {name.removeprefix("mtp."): opened.get_tensor(name) for name in mine}
    return found
