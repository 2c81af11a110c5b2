"""Speculative decoding on one layer, without any model: verify drafts, keep some, go on. Rolling back is free."""

import torch

from replayssm import GDN, LayerSpec, StatePool, verify
from replayssm.reference import recurrence_ref

H, HV, K, V, T = 2, 4, 32, 16, 4
torch.manual_seed(0)


def tokens(n: int) -> tuple[torch.Tensor, ...]:
    """Inputs of n tokens: q, k, v, w (beta) and g (log-decay)."""
    k = torch.nn.functional.normalize(torch.randn(1, n, H, K), dim=-1)
    return torch.randn(1, n, H, K), k, torch.randn(1, n, HV, V), torch.rand(1, n, HV), -torch.rand(1, n, HV)


pool = StatePool(N=1, fold_every=8, window=T)
layer = pool.add_layer(LayerSpec(GDN, H=H, HV=HV, K=K, V=V))
slots = pool.alloc(1)

kept, outputs = [], []
for accepted in (1, 4, 2, 0, 3, 4, 1, 2):
    drafts = tokens(T)
    out = verify(layer, *drafts, slots=slots)  # outputs of all four drafts
    pool.commit(slots, accepted)  # the first `accepted` stay; the others are gone, and nothing was copied
    kept.append([x[:, :accepted] for x in drafts])
    outputs.append(out[:, :accepted])

# The same tokens, one after the other, in float64.
history = [torch.cat(x, 1).double() for x in zip(*kept, strict=True)]
state = torch.zeros(1, HV, V, K, dtype=torch.float64)
exact, _ = recurrence_ref(GDN, state, *history)
error = float((torch.cat(outputs, 1) - exact).abs().max() / exact.abs().max())
print(f"{exact.shape[1]} tokens kept of {8 * T}; largest relative error {error:.1e}; {pool.nbytes} bytes held")
assert error < 1e-5
