"""Tokens a second of a whole model, by drafter and draft length, beside stock transformers' plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

import replayssm
from replayssm.lookup import EarlierOutputs, PromptLookup
from replayssm.speculative import Drafter

DRAFTERS: dict[str, Callable[[], Drafter] | None] = {
    "none": None,
    "prompt-lookup": PromptLookup,
    "earlier-outputs": EarlierOutputs,
}
PROMPTS = (
    'class Server:\n    """A server',
    "import os\nimport sys\n\n\ndef main(argv):\n    ",
    "    def __init__(self, name, parent=None):\n        self.",
)
LENGTHS = (2, 4, 8, "auto")
MOST = 8  # drafts a step that "auto" goes up to
STOCK = "stock"
WARM = 8  # tokens before anything is timed
Length = int | Literal["auto"] | None


@dataclass(frozen=True)
class ModelRow:
    """One model that continued each prompt, one text after the other, with one way of drafting.

    tokens_per_s: after each text's first token, median of the passes. speedup: over stock transformers. forwards,
    drafted, accepted, tokens_per_forward: after the prompts. identical: every token is stock's; None where sampled.
    bytes: of recurrent states and convolution windows that a sequence takes. snapshot_bytes: of the same with a state
    kept for each token of a step.
    """

    model: str
    drafter: str
    draft_tokens: Length
    temperature: float
    tokens: int
    tokens_per_s: float
    speedup: float
    forwards: int
    drafted: int
    accepted: int
    acceptance: float
    tokens_per_forward: float
    identical: bool | None
    bytes: int
    snapshot_bytes: int
    part: str = "model"


@dataclass
class _Pass:
    """All prompts, once."""

    texts: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    timed: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, text: list[int], times: list[float]) -> None:
        """A text, and when each of its new tokens came."""
        self.texts.append(text)
        self.seconds += times[-1] - times[0]
        self.timed += len(times) - 1

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.timed / self.seconds


class _Stamps:
    """A streamer for ``generate`` that looks at the clock. What comes first is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: Tensor) -> None:
        if not self._prompt:
            self.times += [time.perf_counter()] * value.numel()
        self._prompt = False

    def end(self) -> None:
        pass


@dataclass
class Drafting:
    """A model, unattached, and how it is to continue ``prompts``, int64 ``[1, T]`` each. backend: as in ``attach``.
    tell: is told what is done. Needs at least 2 tokens."""

    name: str
    model: Any
    prompts: Sequence[Tensor]
    tokens: int = 128
    temperature: float = 0.0
    repeats: int = 3
    backend: str = "auto"
    tell: Callable[[str], None] = lambda text: None

    def measure(self, drafters: Sequence[str], lengths: Sequence[Length]) -> Iterator[ModelRow]:
        """Stock, then each drafter at each length, timed in alternation after a short text of each. A pass over the
        prompts begins with a drafter that knows no text: what it finds in earlier outputs are those of the pass."""
        ways: list[tuple[str, Length]] = [(STOCK, None)]
        for drafter in drafters:
            ways.extend((drafter, n) for n in (lengths if DRAFTERS[drafter] is not None else [None]))
        prompt = self.prompts[0]
        out = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, do_sample=False,
            return_dict_in_generate=True,
        )  # fmt: skip
        stock_kept = stock_bytes(out.past_key_values)
        kept = {way: self._bytes(way, *stock_kept) for way in ways}
        for way in ways:
            self._run(way, self.prompts[:1], min(self.tokens, WARM))
        passes: dict[tuple[str, Length], list[_Pass]] = {way: [] for way in ways}
        for repeat in range(self.repeats):
            for way in ways if repeat % 2 == 0 else reversed(ways):
                passes[way].append(self._run(way, self.prompts, self.tokens))
        stock = passes[ways[0]]
        for way in ways:
            done, rate = passes[way][0], median(each.rate for each in passes[way])
            yield ModelRow(
                model=self.name, drafter=way[0], draft_tokens=way[1], temperature=self.temperature,
                tokens=sum(map(len, done.texts)), tokens_per_s=rate,
                speedup=rate / median(each.rate for each in stock), forwards=done.forwards, drafted=done.drafted,
                accepted=done.accepted, acceptance=done.accepted / done.drafted if done.drafted else 0.0,
                tokens_per_forward=done.timed / done.forwards,
                identical=done.texts == stock[0].texts if self.temperature == 0 else None,
                bytes=kept[way][0], snapshot_bytes=kept[way][1],
            )  # fmt: skip

    def _run(self, way: tuple[str, Length], prompts: Sequence[Tensor], tokens: int) -> _Pass:
        self.tell(" ".join(str(word) for word in (self.name, *way) if word is not None))
        done = _Pass()
        if way[0] == STOCK:
            for seed, prompt in enumerate(prompts):
                self._stock(prompt, tokens, seed, done)
            return done
        make = DRAFTERS[way[0]]
        drafter = None if make is None else make()
        replayssm.attach(self.model, backend=self.backend)
        try:
            for seed, prompt in enumerate(prompts):
                self._drafted(prompt, tokens, seed, drafter, way[1], done)
        finally:
            replayssm.detach(self.model)
        return done

    def _stock(self, prompt: Tensor, tokens: int, seed: int, done: _Pass) -> None:
        torch.manual_seed(seed)
        stamps = _Stamps()
        how = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        if self.temperature:
            how = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        out = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), streamer=stamps, max_new_tokens=tokens,
            min_new_tokens=tokens, **how,
        )  # fmt: skip
        done.add(out[0, prompt.shape[1] :].tolist(), stamps.times)
        done.forwards += tokens - 1

    def _drafted(
        self, prompt: Tensor, tokens: int, seed: int, drafter: Drafter | None, length: Length, done: _Pass
    ) -> None:
        times: list[float] = []
        rng = torch.Generator(prompt.device).manual_seed(seed)
        out = replayssm.generate(
            self.model, prompt, max_new_tokens=tokens, draft=drafter, draft_tokens=length or "auto",
            sampling=replayssm.Sampling(temperature=self.temperature, generator=rng), eos_token_id=(),
            on_tokens=lambda row, new: times.extend([time.perf_counter()] * len(new)),
        )  # fmt: skip
        done.add(out.sequences[0, prompt.shape[1] :].tolist(), times)
        done.forwards += out.steps
        done.drafted += out.drafted
        done.accepted += out.accepted

    def _bytes(self, way: tuple[str, Length], states: int, windows: list[tuple[int, int]]) -> tuple[int, int]:
        """Of one sequence: what this way keeps, and what a state for each token of a step would take."""
        from replayssm.hf.runner import Runner

        T = 1 if DRAFTERS.get(way[0]) is None else 1 + (way[1] if isinstance(way[1], int) else MOST)
        snapshots = T * states + sum(size + (T - 1) * column for size, column in windows)
        if way[0] == STOCK:
            return snapshots, snapshots
        replayssm.attach(self.model, backend=self.backend)
        try:
            runner = Runner(self.model, T)
            runner.prefill(self.prompts[0].tolist())
            runner.step(self.prompts[0][:, :1])
            return runner.cache.nbytes, snapshots
        finally:
            replayssm.detach(self.model)


def stock_bytes(cache: Any) -> tuple[int, list[tuple[int, int]]]:
    """What a stock cache of one sequence keeps for its recurrent layers: bytes of their states; of each convolution
    window, and of one of its columns."""

    def tensors(kind: str) -> list[Tensor]:
        found = [state for layer in cache.layers for state in getattr(layer, kind, {}).values()]
        return [state for state in found if state is not None]

    states = sum(x.numel() * x.element_size() for x in tensors("recurrent_states"))
    sizes = [(x.numel() * x.element_size(), x.shape[-1]) for x in tensors("conv_states")]
    return states, [(size, size // columns) for size, columns in sizes]
