"""Speculative decoding without a model: what is accepted, how much is drafted, what is looked up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm.lookup import EarlierOutputs, PromptLookup
from replayssm.speculative import Draft, DraftLength, Sampling, Tree, judge, judge_tree

V, D, N = 5, 3, 40_000  # vocabulary, drafts, sampled texts


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chi_square_limit(cells: int, z: float = 4.0) -> float:
    """What a right sampler exceeds in about 1 of 30,000 runs (Wilson and Hilferty)."""
    df = cells - 1
    return df * (1 - 2 / (9 * df) + z * (2 / (9 * df)) ** 0.5) ** 3


def chi_square(texts: Tensor, p: Tensor) -> float:
    """Of ``texts [N, 2]`` against the probabilities ``p [V, V]`` of pairs."""
    seen = torch.bincount(texts[:, 0] * V + texts[:, 1], minlength=V * V)
    expected = p.flatten() * texts.shape[0]
    assert float(expected.min()) > 5
    return float(((seen - expected) ** 2 / expected).sum())


def markov(seed: int) -> Tensor:
    """Logits ``[V, V]`` of the token after each."""
    return torch.randn(V, V, generator=gen(seed), dtype=torch.float64)


def exact(logits: Tensor) -> Tensor:
    """Probabilities of the two tokens after token 0."""
    p = logits.softmax(-1)
    return p[0][:, None] * p


def speculate(target: Tensor, draft: Draft, rule: Callable[..., Tensor]) -> Tensor:
    """The two tokens after token 0 of each row."""
    tokens = torch.cat([torch.zeros(N, 1, dtype=torch.long), draft.tokens], 1)
    return rule(draft, target[tokens])


def rule(draft: Draft, logits: Tensor, forget: bool = False) -> Tensor:
    """``judge``, and steps without drafts where it gave fewer than two tokens."""
    sampling = Sampling(1.0, generator=gen(7))
    accepted, token = judge(draft, logits, sampling)
    if forget:
        token = sampling.draw(logits.softmax(-1)[torch.arange(N), accepted])
    first = torch.where(accepted > 0, draft.tokens[:, 0], token)
    again = sampling.draw(TARGET.softmax(-1)[first])
    second = torch.where(accepted > 1, draft.tokens[:, 1], torch.where(accepted == 1, token, again))
    return torch.stack([first, second], 1)


def believing(draft: Draft, logits: Tensor) -> Tensor:
    """A wrong rule: all drafts are accepted."""
    return draft.tokens[:, :2]


def forgetting(draft: Draft, logits: Tensor) -> Tensor:
    """A wrong rule: after a rejection the token is drawn from p, not from what p has more than q."""
    return rule(draft, logits, forget=True)


TARGET = markov(0)


def sampled_drafts(logits: Tensor) -> Draft:
    """Drawn token by token from another chain, with their distributions; some rows have fewer."""
    q, tokens, probs = logits.softmax(-1), [torch.zeros(N, dtype=torch.long)], []
    random = Sampling(1.0, generator=gen(3))
    for _ in range(D):
        probs.append(q[tokens[-1]])
        tokens.append(random.draw(probs[-1]))
    return Draft(torch.stack(tokens[1:], 1), torch.arange(N) % (D + 1), torch.stack(probs, 1))


def test_sampled_drafts_leave_the_distribution_as_it_is() -> None:
    for seed in (1, 2):
        texts = speculate(TARGET, sampled_drafts(2 * markov(seed)), rule)
        assert chi_square(texts, exact(TARGET)) < chi_square_limit(V * V)


def test_drafts_without_chance_leave_the_distribution_as_it_is() -> None:
    for tokens in ([1, 4, 2], [0, 0, 0]):
        draft = Draft(torch.tensor(tokens).repeat(N, 1), torch.arange(N) % (D + 1))
        assert chi_square(speculate(TARGET, draft, rule), exact(TARGET)) < chi_square_limit(V * V)


def test_the_test_sees_wrong_rules() -> None:
    draft = sampled_drafts(2 * markov(1))
    for wrong in (believing, forgetting):
        draft = draft._replace(lengths=torch.full((N,), D))
        assert chi_square(speculate(TARGET, draft, wrong), exact(TARGET)) > 2 * chi_square_limit(V * V)


def test_a_perfect_drafter_is_always_accepted_and_an_impossible_one_never() -> None:
    sampling = Sampling(1.0, generator=gen(1))
    draft = sampled_drafts(TARGET)._replace(lengths=torch.full((N,), D))
    logits = TARGET[torch.cat([torch.zeros(N, 1, dtype=torch.long), draft.tokens], 1)]
    assert int(judge(draft, logits, sampling).accepted.min()) == D
    never = logits.scatter(2, torch.cat([draft.tokens, draft.tokens[:, :1]], 1)[..., None], float("-inf"))
    verdict = judge(draft, never, sampling)
    assert int(verdict.accepted.max()) == 0
    assert bool((verdict.token != draft.tokens[:, 0]).all())


def test_greedy_accepts_what_is_likeliest() -> None:
    logits = torch.randn(200, D + 1, V, generator=gen())
    tokens = torch.randint(V, (200, D), generator=gen(1))
    tokens[::2] = logits[::2, :D].argmax(-1)
    lengths = torch.randint(D + 1, (200,), generator=gen(2))
    verdict = judge(Draft(tokens, lengths), logits, Sampling())
    for row in range(200):
        n = 0
        while n < int(lengths[row]) and int(tokens[row, n]) == int(logits[row, n].argmax()):
            n += 1
        assert (int(verdict.accepted[row]), int(verdict.token[row])) == (n, int(logits[row, n].argmax()))
    assert 0 < int((verdict.accepted == D).sum()) < 200


def test_no_drafts_at_all() -> None:
    logits = torch.randn(4, 1, V, generator=gen())
    for sampling in (Sampling(), Sampling(0.7, generator=gen())):
        verdict = judge(Draft.of([[]] * 4), logits, sampling)
        assert verdict.accepted.tolist() == [0] * 4
    assert torch.equal(judge(Draft.of([[]] * 4), logits, Sampling()).token, logits[:, 0].argmax(-1))


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"logits must be \[B=2, D \+ 1=2, vocabulary\]"):
        judge(Draft.of([[1], [2]]), torch.zeros(2, 3, V), Sampling())
    with pytest.raises(ValueError, match=r"probs must be \[B, D, vocabulary\]"):
        judge(Draft.of([[1], [2]])._replace(probs=torch.ones(2, 1, V + 1)), torch.zeros(2, 2, V), Sampling(1.0))


def test_top_k_and_top_p() -> None:
    logits = torch.tensor([[0.1, 3.0, 2.0, -1.0, 2.5]])
    p = logits.softmax(-1)[0]
    assert Sampling().probs(logits)[0].tolist() == [0, 1, 0, 0, 0]
    torch.testing.assert_close(Sampling(2.0).probs(logits), (logits / 2).softmax(-1))
    kept = torch.tensor([0, 1, 0, 0, 1]) * p
    torch.testing.assert_close(Sampling(1.0, top_k=2).probs(logits)[0], kept / kept.sum())
    share = float(p[1])  # exactly reached by the likeliest alone
    assert Sampling(1.0, top_p=share - 1e-6).probs(logits)[0].tolist() == [0, 1, 0, 0, 0]
    torch.testing.assert_close(Sampling(1.0, top_p=share + 1e-6).probs(logits)[0], kept / kept.sum())
    torch.testing.assert_close(Sampling(1.0, top_p=1.0).probs(logits)[0], p)
    assert Sampling(1.0).probs(logits.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-320])
def test_cold_sampling_is_greedy(temperature: float) -> None:
    """Where dividing logits by it would give infinities, and these no probabilities."""
    logits = torch.tensor([[0.1, 900.0, 2.0, float("-inf"), -3.0], [-5.0, -9.0, -5.5, -6.0, -7.0]])
    assert torch.equal(Sampling(temperature).probs(logits), Sampling().probs(logits))


@pytest.mark.parametrize(
    "wrong",
    [
        dict(temperature=-1.0), dict(temperature=float("nan")), dict(temperature="1"), dict(temperature=None),
        dict(top_k=0), dict(top_k=2.5), dict(top_p=0.0), dict(top_p=1.1), dict(top_p=float("nan")), dict(top_p="all"),
        dict(generator=3),
    ],
)  # fmt: skip
def test_sampling_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_draft_length_follows_what_is_accepted() -> None:
    length = DraftLength(8)
    start = length.next()
    for _ in range(30):
        length.learn(length.next(), length.next())
    assert 0 < start < length.next() == 8
    for _ in range(30):
        length.learn(3, 0)
    tried = [length.next() for _ in range(32)]
    assert Counter(tried) == {0: 28, 1: 4}, "a bad drafter is tried now and then"
    for _ in range(30):
        length.learn(1, 1)
    assert length.next() > 3
    assert [DraftLength(5, fixed=True).next() for _ in range(3)] == [5, 5, 5]
    assert DraftLength(0).next() == 0


def brute_force(text: Sequence[int], longest: int, shortest: int, most: int) -> list[int]:
    """The text is taken to go on as it did at the latest place where its end came before."""
    for n in range(min(longest, len(text)), shortest - 1, -1):
        for at in range(len(text) - 1, n - 1, -1):
            if text[at - n : at] == text[len(text) - n :]:
                found = list(text)
                while len(found) < len(text) + most:
                    found.append(found[at + len(found) - len(text)])
                return found[len(text) :]
    return []


def test_prompt_lookup_against_brute_force() -> None:
    rng = random.Random(0)
    drafter = PromptLookup(longest=3, shortest=1)
    texts = [[rng.randrange(4) for _ in range(rng.randrange(1, 9))] for _ in range(5)]
    for _ in range(60):
        most = [rng.randrange(7) for _ in texts]
        draft = drafter.propose(texts, most, Sampling())
        assert isinstance(draft, Draft)
        for row, (text, n) in enumerate(zip(texts, most, strict=True)):
            got = draft.tokens[row, : draft.lengths[row]].tolist()
            assert got == brute_force(text, 3, 1, n)
        for text in texts:
            text += [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.05 and len(texts) > 2:
            keep = sorted(rng.sample(range(len(texts)), len(texts) - 1))
            texts = [texts[i] for i in keep]
            drafter.select(keep)


def test_lookup_wants_as_many_tokens_as_asked() -> None:
    text = [[1, 2, 3, 9, 7, 3]]
    assert PromptLookup(longest=2, shortest=1).propose(text, [2], Sampling()).tokens.tolist() == [[9, 7]]
    assert PromptLookup(longest=2, shortest=2).propose(text, [2], Sampling()).lengths.tolist() == [0]
    with pytest.raises(ValueError, match="1 <= shortest <= longest"):
        PromptLookup(2, 3)


def test_earlier_outputs_remembers_other_rows_and_calls() -> None:
    drafter = EarlierOutputs(longest=3, shortest=2)
    drafter.propose([[1, 2, 3, 4, 5]], [4], Sampling())
    drafter.select([])
    texts = [[8, 2, 3], [7, 7, 6], [6, 9]]
    draft = drafter.propose(texts, [4, 4, 4], Sampling())
    assert draft.lengths.tolist() == [2, 0, 0] and draft.tokens[0, :2].tolist() == [4, 5]
    for text in texts:
        text += [2, 3]
    drafter.select([0, 2])
    draft = drafter.propose([texts[0], texts[2]], [4, 1], Sampling())
    assert draft.tokens[0, : draft.lengths[0]].tolist() == [2, 3, 2, 3], "its own text is the latest"
    assert draft.lengths.tolist() == [4, 1]


def test_trees_share_what_begins_alike() -> None:
    tree = Tree.of([[[5, 6, 7], [5, 8], [9]], [], [[5]]])
    assert tree.tokens.tolist() == [[5, 6, 7, 8, 9], [0] * 5, [5, 0, 0, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0, -1], [-2] * 5, [-1, -2, -2, -2, -2]]


def test_greedy_trees() -> None:
    """The accepted path is the longest that the likeliest tokens follow."""
    rng = random.Random(0)
    seen = Counter()
    for _ in range(200):
        alternatives = [[rng.randrange(3) for _ in range(rng.randrange(1, 4))] for _ in range(3)]
        tree = Tree.of([alternatives])
        best = [rng.randrange(3) for _ in range(tree.tokens.shape[1] + 1)]
        paths, token = judge_tree(tree, torch.nn.functional.one_hot(torch.tensor([best]), 3).float(), Sampling())
        at, want = -1, []
        while True:
            children = [i for i, p in enumerate(tree.parents[0].tolist()) if p == at]
            found = [i for i in children if int(tree.tokens[0, i]) == best[at + 1]]
            if not found:
                break
            at = found[0]
            want.append(at)
        assert paths == [want] and token.tolist() == [best[at + 1]]
        seen[len(want)] += 1
    assert set(seen) == {0, 1, 2, 3}
    with pytest.raises(ValueError, match=r"logits must be \[B=1, D \+ 1=2"):
        judge_tree(Tree.of([[[1]]]), torch.zeros(1, 3, V), Sampling())


def test_trees_leave_the_distribution_as_it_is() -> None:
    tree = Tree.of([[[1, 2], [1, 4], [3], [0, 0]]])
    tree = Tree(*(x.repeat(N // 4, 1) for x in tree))
    sampling = Sampling(1.0, generator=gen(7))
    logits = TARGET[torch.cat([torch.zeros(N // 4, 1, dtype=torch.long), tree.tokens], 1)]
    paths, token = judge_tree(tree, logits, sampling)
    texts = torch.zeros(N // 4, 2, dtype=torch.long)
    again = sampling.draw(TARGET.softmax(-1)[token])
    for row, path in enumerate(paths):
        text = [*(int(tree.tokens[row, i]) for i in path), int(token[row]), int(again[row])]
        texts[row] = torch.tensor(text[:2])
    assert {len(path) for path in paths} == {0, 1, 2}
    assert chi_square(texts, exact(TARGET)) < chi_square_limit(V * V)


def test_lookup_of_several_places() -> None:
    text = [[1, 2, 7, 1, 2, 8, 1, 2, 9, 1, 2]]
    tree = PromptLookup(branches=3).propose(text, [8], Sampling())
    assert isinstance(tree, Tree)
    # Half of the tokens go to the latest place, half of the rest to the one before.
    assert tree.tokens.tolist() == [[9, 1, 2, 9, 8, 1, 7, 1]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, -1, 4, -1, 6]]
    assert PromptLookup(branches=3).propose(text, [1], Sampling()).tokens.tolist() == [[9]]


def test_a_comb_has_leaves_beside_its_chain() -> None:
    tree = Tree.comb(torch.tensor([[[5, 6], [7, 8], [9, 1]]]))
    assert tree.tokens.tolist() == [[5, 6, 7, 8, 9, 1]]
    assert tree.parents.tolist() == [[-1, -1, 0, 0, 2, 2]]
