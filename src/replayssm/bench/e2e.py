"""Whole models in transformers' generate: what a decode step takes, with and without replay, and what for."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import replayssm
from replayssm.hf.static import static_arguments

CYCLE = 16  # tokens from fold to fold
WARM = 8  # steps that are not timed


@dataclass(frozen=True)
class Variant:
    """compiled: a static cache, and generate's own torch.compile. attaching: None: stock transformers. verifies: steps
    of several tokens, drafts among them, as of ``replayssm.generate(static=True)``."""

    compiled: bool
    attaching: dict[str, Any] | None
    verifies: bool = False


VARIANTS = {
    "stock-eager": Variant(False, None),
    "stock-compiled": Variant(True, None),
    "replay-eager": Variant(False, dict(fold_every=CYCLE)),
    "replay-off": Variant(True, dict(fold_every=1)),
    "replay-on": Variant(True, dict(fold_every=CYCLE)),
    "replay-auto": Variant(True, {}),
    "replay-verify": Variant(True, dict(fold_every=CYCLE), verifies=True),
}
"""replay-off: our cache and kernels, writing the state in each step; auto: what attach chooses of off and on; verify:
steps of T tokens, of which all but one are accepted. On a CPU nothing is compiled."""


@dataclass(frozen=True)
class Row:
    """A decode step of ``batch`` texts after ``prompt`` tokens, of T tokens each. tokens_per_s: of those that stay.

    ms: median over windows of whole fold cycles; lowest, highest: of these windows. peak_bytes: of device memory, and
    None on a CPU. floor_ms: weights and recurrent states, read once at the memory's speed. parts: milliseconds of GPU
    work by what it is for, and idle, from a profile of one cycle; None on a CPU. first_ms: the prompt. Of experts
    the floor has those that the step's tokens meet, see :func:`weights_read`.
    warm_s: the first text, compilation included.
    """

    model: str
    layers: int
    variant: str
    dtype: str
    state_dtype: str
    batch: int
    T: int
    prompt: int
    ms: float
    lowest: float
    highest: float
    tokens_per_s: float
    peak_bytes: int | None
    weight_bytes: int
    state_bytes: int
    floor_ms: float
    first_ms: float
    warm_s: float
    launches: float | None
    parts: dict[str, float] | None


class Stamps(StoppingCriteria):
    """When each step was done: events on a GPU, so that nothing waits for it; wall time on a CPU."""

    def __init__(
        self, device: torch.device, tell: Callable[[str], None] | None = None, profile: Any = None, window: int = CYCLE
    ) -> None:
        self.device, self.tell, self.profile, self.window = device, tell, profile, window
        self.at: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.at.append(event)
        else:
            self.at.append(time.perf_counter())
        n = len(self.at)
        if self.profile is not None and n == WARM:
            self.profile.start()
        if self.profile is not None and n == WARM + self.window:
            self.profile.stop()
        if self.tell is not None and n % CYCLE == 0:
            self.tell(f"{n} tokens")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def steps(self) -> list[float]:
        """Milliseconds of each step after the first."""
        pairs = list(zip(self.at, self.at[1:], strict=False))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [a.elapsed_time(b) for a, b in pairs]
        return [(b - a) * 1e3 for a, b in pairs]


@contextmanager
def attached(model: Any, variant: Variant, **options: Any) -> Iterator[None]:
    """The model as the variant needs it."""
    torch.compiler.reset()
    if variant.attaching is not None:
        replayssm.attach(model, **variant.attaching | options)
    try:
        yield
    finally:
        replayssm.detach(model)
        model.__dict__.pop("_compiled_call", None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(
    name: str,
    model: Any,
    variant: str,
    batch: int,
    *,
    T: int = 1,
    prompt: int = 64,
    cycles: int = 4,
    state_dtype: torch.dtype = torch.float32,
    read: float,
    tell: Callable[[str], None] | None = None,
) -> Row:
    """One row. T: tokens a step, of a variant that verifies. read: bytes a second that the machine reads."""
    device, how = model.device, VARIANTS[variant]
    on_gpu = device.type == "cuda"
    if "full_attention" not in model.config.layer_types:
        raise ValueError(f"{name}: none of its {model.config.num_hidden_layers} layers has attention; keep more layers")
    ids = torch.randint(3, 100, (batch, prompt), generator=torch.Generator().manual_seed(0)).to(device)
    if T > 1 and not how.verifies:
        raise ValueError(f"{name}: {variant} takes one token a step; got T={T}")
    stay = max(1, T - 1)
    cycle = -(-CYCLE // stay)  # steps from fold to fold
    window = -(-CYCLE // cycle) * cycle
    new = WARM + window * cycles + 2
    static = static_arguments(device) if how.compiled else {}

    def text(stamps: Stamps) -> Stamps:
        if how.verifies:
            _verify(model, ids, T, stay, new, stamps)
            return stamps
        criteria = StoppingCriteriaList([stamps])
        with torch.no_grad():
            model.generate(ids, max_new_tokens=new, do_sample=False, stopping_criteria=criteria, **static)
        return stamps

    with attached(model, how, state_dtype=state_dtype):
        start = time.perf_counter()
        text(Stamps(device, tell))
        if on_gpu:
            torch.cuda.synchronize(device)
        warm = time.perf_counter() - start
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        stamps = text(Stamps(device, tell))
        steps = stamps.steps()
        first = (time.perf_counter() - start) * 1e3 - sum(steps)
        peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
        launches, parts = _parts(text, device, window) if on_gpu else (None, None)
    windows = [mean(steps[i : i + window]) for i in range(WARM, WARM + window * cycles, window)]
    ms = median(windows)
    if parts is not None:
        parts["idle"] = max(0.0, ms - sum(parts.values()))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    states = state_bytes(model.config, batch, state_dtype)
    floor = (weights_read(model, batch * T) + states) / read * 1e3
    return Row(
        model=name, layers=model.config.num_hidden_layers, variant=variant, dtype=str(model.dtype)[6:],
        state_dtype=str(state_dtype)[6:], batch=batch, T=T, prompt=prompt, ms=ms, lowest=min(windows),
        highest=max(windows), tokens_per_s=batch * stay / ms * 1e3, peak_bytes=peak, weight_bytes=weights,
        state_bytes=states, floor_ms=floor, first_ms=first, warm_s=warm, launches=launches,
        parts=parts,
    )  # fmt: skip


def _verify(model: Any, ids: torch.Tensor, T: int, stay: int, steps: int, stamps: Stamps) -> None:
    """``steps`` steps of T tokens a row, the first ``stay`` of which are accepted whatever they are; the host waits for
    what the model says, as it has to where that decides what is accepted."""
    from replayssm.hf.verifying import StaticRunner

    runner = StaticRunner(model, T, steps * stay)
    last = runner.prefill(ids.tolist()).argmax(-1)
    for _ in range(steps):
        said = runner.step(last[:, None].expand(-1, T)).argmax(-1).cpu()
        runner.take_back([T - stay] * len(said))
        last = said[:, stay - 1]
        stamps(ids, None)


PARTS = (
    ("state", ("prepare_kernel", "read_kernel", "step_kernel", "fold_kernel")),
    ("attention", ("sdpa", "flash", "fmha", "attention")),
    ("weights", ("nvjet", "gemm", "gemv", "cutlass", "cublas", "splitk", "_mm_", "_addmm_", "_bmm_")),
)
"""What a kernel is for, by what its name contains. Compiled stock reads its states in kernels that torch made, which
tell nothing: they are in the rest."""


def part(kernel: str) -> str:
    """The part that a kernel's time belongs to."""
    low = kernel.lower()
    return next((name for name, words in PARTS if any(word in low for word in words)), "rest")


def _parts(text: Callable[[Stamps], Stamps], device: torch.device, window: int) -> tuple[float, dict[str, float]]:
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    text(Stamps(device, profile=profiler, window=window))
    parts = dict.fromkeys([*(name for name, _ in PARTS), "rest"], 0.0)
    launches = 0
    for event in profiler.key_averages():
        parts[part(event.key)] += event.self_device_time_total / window / 1e3
        launches += event.count
    return launches / window, parts


def weights_read(model: Any, tokens: int) -> float:
    """Bytes of the weights that a step of ``tokens`` tokens must read: of E experts, where each token goes to k of them
    at random, ``E (1 - (1 - k / E)^tokens)``."""
    config = model.config.get_text_config(decoder=True)
    k = next((getattr(config, name) for name in _EXPERTS_A_TOKEN if getattr(config, name, None)), 0)
    total = float(sum(p.numel() * p.element_size() for p in model.parameters()))
    for module in model.modules():
        experts = getattr(module, "num_experts", 0)
        for x in module.parameters(recurse=False):
            if k and experts and x.dim() == 3 and x.shape[0] == experts:
                total -= x.numel() * x.element_size() * (1 - k / experts) ** tokens
    return total


_EXPERTS_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


def state_bytes(config: Any, batch: int, dtype: torch.dtype) -> int:
    """Bytes of all recurrent states of ``batch`` sequences."""
    layers = sum(kind == "linear_attention" for kind in config.layer_types)
    if hasattr(config, "linear_num_value_heads"):
        numel = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    elif hasattr(config, "mamba_num_heads"):
        numel = config.mamba_num_heads * config.mamba_head_dim * config.ssm_state_size
    else:
        numel = config.linear_num_heads * config.linear_head_dim**2
    return batch * layers * numel * dtype.itemsize
