"""Stock transformers and ReplaySSM on the same model and prompt: the same tokens? how fast? how many bytes?"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from replayssm import attach, detach, generate
from replayssm.cli.args import UsageError
from replayssm.cli.checkpoint import Checkpoint
from replayssm.cli.stream import TextStream, sampling
from replayssm.traffic import plain_bytes, replay_bytes

SIDES = ("stock", "replay")
REPEATS = 3
TIMED_TOKENS = 64


@dataclass(frozen=True)
class Result:
    """What one model showed. Speeds are medians of ``REPEATS`` runs after the streamed one, sides in alternating order.

    divergence: index of the first token that differs, or None; gap: how far apart stock's scores of the two tokens are
    there; difference: the largest between both sides' logits up to there. drafts_accepted, tokens_per_forward,
    drafts_tokens_per_s: of greedy decoding with drafts looked up in the text, prompt included; drafts_identical: that
    it gave the tokens of decoding without.
    """

    recurrence: str
    tokens: int
    divergence: int | None
    gap: float
    difference: float
    tokens_per_s: float
    stock_tokens_per_s: float
    state_bytes_per_token: float
    stock_state_bytes_per_token: float
    bytes_per_sequence: int
    stock_bytes_per_sequence: int
    drafts_accepted: float = 0.0
    tokens_per_forward: float = 1.0
    drafts_tokens_per_s: float = 0.0
    drafts_identical: bool = True

    @property
    def identical(self) -> bool:
        """Every token is the same."""
        return self.divergence is None and self.drafts_identical

    def summary(self) -> dict[str, Any]:
        """The keys of ``replayssm demo --json``."""
        return {
            "recurrence": self.recurrence,
            "identical": self.identical,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "stock_tokens_per_s": round(self.stock_tokens_per_s, 2),
            "state_bytes_per_token": round(self.state_bytes_per_token),
            "stock_state_bytes_per_token": round(self.stock_state_bytes_per_token),
            "bytes_per_sequence": self.bytes_per_sequence,
            "drafts_accepted": round(self.drafts_accepted, 3),
            "tokens_per_forward": round(self.tokens_per_forward, 3),
            "drafts_tokens_per_s": round(self.drafts_tokens_per_s, 2),
        }


@dataclass
class Comparison:
    """One model and its prompt. attaching, sampling: arguments of :func:`replayssm.attach` and of ``generate``.
    ``write(side, text)`` and ``status(text)`` are told what happens. static: with caches of fixed size, whose steps are
    compiled on a GPU. models: ``stock``, and for ``replay`` a copy, so that neither is compiled again for the other;
    as long as that one is attached, stock's recurrent functions are called through a look at their arguments."""

    name: str
    checkpoint: Checkpoint
    prompt: str
    tokens: int
    seed: int
    attaching: dict[str, Any]
    sampling: dict[str, Any]
    write: Callable[[str, str], None]
    status: Callable[[str], None]
    static: bool = False
    models: dict[str, Any] = field(default_factory=dict, init=False)

    def run(self) -> Result:
        """Both sides write the text; then both are timed."""
        self.models = {"stock": self.checkpoint.model, "replay": copy.deepcopy(self.checkpoint.model)}
        try:
            attach(self.models["replay"], **self.attaching)
        except (ValueError, RuntimeError) as error:
            raise UsageError(str(error)) from None
        try:
            return self._compare()
        finally:
            detach(self.models["replay"])

    def _compare(self) -> Result:
        outputs, streams = {}, {}
        for side in SIDES:
            compiles = ", compiling first" if self.static else ""
            self.status(f"{'stock transformers' if side == 'stock' else 'ReplaySSM'} writes{compiles}")
            outputs[side], streams[side] = self._generate(side, self.tokens, output_logits=True, output_scores=True)
        divergence = first_difference(streams["stock"].tokens, streams["replay"].tokens)
        gap, difference = _logit_gap(outputs, streams["stock"].tokens, streams["replay"].tokens, divergence)
        rates = self._time()
        plain, drafted, seconds = self._draft()
        replay, stock = outputs["replay"].past_key_values, outputs["stock"].past_key_values
        layers = replay.recurrent.pool.layers
        return Result(
            recurrence=self.name, tokens=self.tokens, divergence=divergence, gap=gap, difference=difference,
            tokens_per_s=median(rates["replay"]), stock_tokens_per_s=median(rates["stock"]),
            state_bytes_per_token=sum(map(replay_bytes, layers)),
            stock_state_bytes_per_token=sum(map(plain_bytes, layers)),
            bytes_per_sequence=replay.nbytes + self.static * _recurrent_bytes(replay),  # there, of convolutions alone
            stock_bytes_per_sequence=_recurrent_bytes(stock),
            drafts_accepted=drafted.acceptance, tokens_per_forward=drafted.tokens_per_step,
            drafts_tokens_per_s=self.tokens / seconds,
            drafts_identical=plain.sequences.equal(drafted.sequences),
        )  # fmt: skip

    def _time(self) -> dict[str, list[float]]:
        rates: dict[str, list[float]] = {side: [] for side in SIDES}
        for repeat in range(REPEATS):
            for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
                done = sum(map(len, rates.values()))
                self.status(f"timing, run {done + 1} of {2 * REPEATS}")
                rates[side].append(self._generate(side, min(self.tokens, TIMED_TOKENS))[1].rate)
        return rates

    def _draft(self) -> tuple[Any, Any, float]:
        """ReplaySSM's greedy text without and with drafts, and the seconds of the latter, once warm."""
        import torch

        self.status("ReplaySSM verifies drafts")
        model = self.models["replay"]
        ids = torch.tensor([self.checkpoint.encode(self.prompt)], device=model.device)

        def text(draft: str | None) -> Any:
            return generate(model, ids, max_new_tokens=self.tokens, draft=draft, eos_token_id=(), static=self.static)

        plain, _ = text(None), text("prompt-lookup")
        begin = time.perf_counter()
        drafted = text("prompt-lookup")
        return plain, drafted, time.perf_counter() - begin

    def _generate(self, side: str, tokens: int, **outputs: Any) -> tuple[Any, TextStream]:
        """One text. Where no outputs are asked for it is a timed run, and its text goes nowhere."""
        import torch

        from replayssm.hf.static import static_arguments

        model, decode = self.models[side], self.checkpoint.decode if outputs else lambda ids: ""
        static = static_arguments(model.device) if self.static else {}
        stream = TextStream(decode, lambda text: self.write(side, text), warm=4 if self.static else 1)
        ids = torch.tensor([self.checkpoint.encode(self.prompt)], device=model.device)
        torch.manual_seed(self.seed)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), streamer=stream, return_dict_in_generate=True,
            min_new_tokens=tokens, **sampling(tokens, **self.sampling), **static, **outputs,
        )  # fmt: skip
        return out, stream


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """Index of the first element that differs; None where the sequences are equal."""
    pairs = enumerate(zip(a, b, strict=False))
    shorter = min(len(a), len(b))
    return next((i for i, (x, y) in pairs if x != y), None if len(a) == len(b) else shorter)


def _logit_gap(
    outputs: dict[str, Any], theirs: Sequence[int], ours: Sequence[int], divergence: int | None
) -> tuple[float, float]:
    """See :class:`Result`: ``gap`` and ``difference``."""
    stock, replay = outputs["stock"].logits, outputs["replay"].logits
    last = len(stock) if divergence is None else divergence + 1
    difference = max(float((a - b).abs().max()) for a, b in zip(stock[:last], replay[:last], strict=True))
    if divergence is None:
        return 0.0, difference
    scores = outputs["stock"].scores[divergence][0]
    return float((scores[theirs[divergence]] - scores[ours[divergence]]).abs()), difference


def _recurrent_bytes(cache: Any) -> int:
    """Bytes of recurrent and convolution states in a stock cache."""
    states = [
        state
        for layer in cache.layers
        for kind in ("conv_states", "recurrent_states")
        for state in getattr(layer, kind, {}).values()
    ]
    return sum(state.numel() * state.element_size() for state in states if state is not None)
