"""Drafts from the head for multi-token prediction that a checkpoint of the model brings along and transformers drops.

Qwen3.5's layout, ``mtp.*``. For a text ``x`` whose token ``t`` left the decoder as ``h_t``::

    u_t = fc([norm_embedding(embed(x_{t+1})), norm_hidden(h_t)])
    g_t = norm(layer(u_0 .. u_t))           an attention layer with a cache of its own; u_t has the position t
    x_{t+2} ~ lm_head(g_t)                  and from there on with g_t in place of h_{t+1}
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
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

TYPES = ("qwen3_5_text", "qwen3_5_moe_text")


class MTPHead(nn.Module):
    """A :class:`replayssm.speculative.Drafter` for ``model``, whose embedding, rotary positions and output layer it
    shares. Its weights are named as in the checkpoint, without ``mtp.``. One call of ``generate`` at a time.
    branches: as of :class:`replayssm.hf.drafters.DraftModel`."""

    def __init__(self, model: PreTrainedModel, branches: int = 1) -> None:
        super().__init__()
        if not isinstance(branches, int) or branches < 1:
            raise ValueError(f"MTPHead: branches must be a whole number of at least 1; got {branches!r}")
        self.branches = branches
        config = copy.deepcopy(model.config.get_text_config(decoder=True))
        if config.model_type not in TYPES:
            raise ValueError(f"MTPHead: known for {', '.join(TYPES)}; got {config.model_type!r}")
        decoder: Any = model.get_decoder()
        attention = config.layer_types.index("full_attention")
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        norm, width = type(decoder.norm), config.hidden_size
        self.pre_fc_norm_embedding = norm(width, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(width, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([type(decoder.layers[attention])(config, 0)])
        self.norm = norm(width, eps=config.rms_norm_eps)
        self._model, self._config = [model], config  # in a list, so that its weights are not ours
        self.runner: Runner | None = None
        self._restart()
        self.to(decoder.norm.weight.device, decoder.norm.weight.dtype).eval()

    @staticmethod
    def load(model: PreTrainedModel, path: str | Path | None = None, branches: int = 1) -> MTPHead:
        """The head in the directory ``path``, by default the one that the model was loaded from. Raises ValueError
        where there is none, or one of other weights than are known."""
        head = MTPHead(model, branches)
        place = path or model.config._name_or_path
        if not place:
            raise ValueError("MTPHead: the model was not loaded from a directory; MTPHead.load(model, path) names one")
        directory = Path(place)
        try:
            found = _read(directory)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ValueError(f"MTPHead: the weights in {directory} cannot be read: {error}") from None
        if not found:
            raise ValueError(f"MTPHead: no weights mtp.* in {directory}")
        expected = head.state_dict()
        wrong = sorted(set(expected) ^ set(found)) or [k for k, x in expected.items() if x.shape != found[k].shape]
        if wrong:
            raise ValueError(f"MTPHead: the weights in {directory} are not those that are known: {', '.join(wrong)}")
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
        u = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(h)], -1))
        columns = torch.arange(self.columns + T)
        own = columns[self.columns :]
        visible = (columns >= self.pads[:, None, None]) & (columns <= own[:, None])
        positions = (own - self.pads[:, None]).clamp(min=0).to(u.device)
        x = self.layers[0](
            u,
            position_embeddings=decoder.rotary_emb(u, positions[None].expand(3, -1, -1)),
            attention_mask=attention_mask(visible, u.dtype).to(u.device),
            cache=self.cache,
        )
        self.columns += T
        return self.norm(x)


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
