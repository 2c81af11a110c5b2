"""``replayssm.generate(static=True)``: drafts verified with fixed memory, rows at places of their own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from fake_graphs import FakeGraph
from fake_graphs import fake_graphs as fake_graphs
from test_speculative_generate import GREEDY, NEW, SPARSE, Fixed, Subject, assert_counts, exact, run, small
from test_speculative_generate import subject as subject
from tiny_models import BACKEND, BUILDERS, CHAINS_ONLY, build

import replayssm
from replayssm import Sampling
from replayssm.hf.captured import CapturedStep, Compiled
from replayssm.hf.verifying import StaticRunner
from replayssm.lookup import PromptLookup

transformers.logging.set_verbosity_error()


def test_greedy(subject: Subject) -> None:
    """None, lookups, planted drafters, a model close to it: the tokens of plain decoding, as with memory that moves."""
    if subject.model.config.get_text_config().model_type in SPARSE:
        with pytest.raises(ValueError, match="static=True is not known for"):
            run(subject, None, static=True)
        return
    drafters = [None, "prompt-lookup", *(Fixed(subject.texts(), how) for how in ("bad", "perfect", "mixed"))]
    for draft in [*drafters, subject.close]:
        out = run(subject, draft, draft_tokens=4, static=True)
        assert torch.equal(out.sequences, subject.want), draft
        moving = run(subject, Fixed(subject.texts(), draft.how) if isinstance(draft, Fixed) else draft, draft_tokens=4)
        assert (out.steps, out.accepted, out.drafted) == (moving.steps, moving.accepted, moving.drafted)


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "mamba2"])
def test_sampling_is_lossless(name: str) -> None:
    model, start = small(name), [3]
    sampling = Sampling(0.9, top_k=4, generator=torch.Generator().manual_seed(11))
    out = replayssm.generate(
        model, torch.tensor([start]).expand(800, -1), max_new_tokens=4, draft=PromptLookup(), draft_tokens=2,
        sampling=sampling, eos_token_id=(), static=True,
    )  # fmt: skip
    assert_counts(out.sequences[:, 1:4], 800 * exact(model, start, sampling))
    replayssm.detach(model)


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_rows_stop_early_and_texts_follow_one_another(name: str) -> None:
    model = build(name)
    gen = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 100, (4, 20), generator=gen)
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    ends = [int(plain[0, -15]), int(plain[2, -9])]
    replayssm.attach(model, backend=BACKEND)
    want = replayssm.generate(model, ids, max_new_tokens=NEW, draft="prompt-lookup", eos_token_id=ends)
    assert len(set(want.new_tokens)) > 1
    for _ in range(2):
        got = replayssm.generate(model, ids, max_new_tokens=NEW, draft="prompt-lookup", eos_token_id=ends, static=True)
        assert torch.equal(got.sequences, want.sequences) and got.new_tokens == want.new_tokens
    replayssm.detach(model)


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "nemotron_h", "falcon_h1"])
def test_steps_are_one_graph_compiled_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    model = build(name)
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    replayssm.attach(model, fold_every=6, backend=BACKEND)
    graphs: list[Any] = []
    step = Compiled(model, lambda graph, inputs: graphs.append(graph) or graph)
    monkeypatch.setattr(StaticRunner, "_stepper", lambda self: lambda cache, inputs: step(cache=cache, **inputs))
    for draft in ("prompt-lookup", Fixed([row.tolist() for row in want], "mixed")):
        out = replayssm.generate(model, ids, max_new_tokens=20, draft=draft, draft_tokens=3, static=True)
        assert torch.equal(out.sequences, want)
    assert len(graphs) == 1
    replayssm.detach(model)


def test_states_are_written_as_rarely_as_in_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replayssm.attach(build("qwen3_5"), backend=BACKEND, state_dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    want = replayssm.generate(model, ids, max_new_tokens=30, draft="prompt-lookup", draft_tokens=3)
    writes: list[torch.Tensor] = []
    step = StaticRunner.step

    def watched(self: StaticRunner, *args: Any) -> torch.Tensor:
        states = self.cache.recurrent.states
        before = {layer: state.ckpt.clone() for layer, state in states.items()}
        out = step(self, *args)
        writes.append(sum((before[layer] != state.ckpt).any() for layer, state in states.items()) > 0)  # pyright: ignore
        return out

    monkeypatch.setattr(StaticRunner, "step", watched)
    got = replayssm.generate(model, ids, max_new_tokens=30, draft="prompt-lookup", draft_tokens=3, static=True)
    assert torch.equal(got.sequences, want.sequences)
    assert 0 < sum(map(int, writes)) <= 6 < len(writes)
    replayssm.detach(model)


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "nemotron_h"])
def test_captured_steps(name: str, fake_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with a stand-in for the graph: what is fed reaches it, other texts get graphs of their own."""
    torch.compiler.reset()
    model = replayssm.attach(build(name), backend=BACKEND)
    monkeypatch.setattr(
        StaticRunner, "_stepper", lambda self: CapturedStep(Compiled(model, lambda graph, inputs: graph))
    )
    for seed in range(2):
        ids = torch.randint(3, 100, (3, 9), generator=torch.Generator().manual_seed(seed))
        want, before = replayssm.generate(model, ids, max_new_tokens=24, eos_token_id=()), FakeGraph.count
        got = replayssm.generate(
            model, ids, max_new_tokens=24, eos_token_id=(), draft=Fixed(want.sequences.tolist(), "mixed"),
            draft_tokens=3, static=True,
        )  # fmt: skip
        assert torch.equal(got.sequences, want.sequences) and 0 < got.accepted < got.drafted
        assert FakeGraph.count > before
    replayssm.detach(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in CHAINS_ONLY])
def test_captured_on_a_gpu(name: str) -> None:
    torch.compiler.reset()
    model, close = (replayssm.attach(build(name).cuda()) for _ in range(2))
    ids = torch.randint(3, 100, (3, 9), generator=torch.Generator().manual_seed(0))
    want = replayssm.generate(model, ids, max_new_tokens=24, eos_token_id=())
    for draft in (None, "prompt-lookup", close):
        got = replayssm.generate(model, ids, max_new_tokens=24, eos_token_id=(), draft=draft, static=True)
        assert torch.equal(got.sequences, want.sequences), draft
    replayssm.detach(model)
    replayssm.detach(close)


def test_a_cache_goes_with_its_call() -> None:
    model, gone = replayssm.attach(build("qwen3_5"), backend=BACKEND), []

    class Watching(StaticRunner):
        def prefill(self, texts: Any) -> torch.Tensor:
            out = super().prefill(texts)
            gone.append(weakref.ref(self.cache))
            return out

    runner = Watching(model, 3, 8)
    runner.prefill([[5, 6, 7], [8, 9]])
    gc.disable()
    try:
        del runner
        assert gone[0]() is None
    finally:
        gc.enable()
    replayssm.detach(model)


def test_what_fixed_memory_cannot_verify_is_said() -> None:
    model, ids = build("qwen3_5"), torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="needs a model that is attached"):
        replayssm.generate(_llama(), ids, draft="prompt-lookup", static=True)
    replayssm.attach(model, backend=BACKEND)
    for draft in ("prompt-tree", PromptLookup(branches=2)):
        with pytest.raises(ValueError, match="static=True verifies chains"):
            replayssm.generate(model, ids, draft=draft, static=True)
    replayssm.detach(model)


def _llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)
