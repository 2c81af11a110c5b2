"""From a model's projections to the ``q, k, v, w, g`` of the recurrence. All arithmetic in at least float32.

| | q | k | v | w | g |
| - | - | - | - | - | - |
| Mamba-2 | C | B | x | dt | dt * A |
| Gated DeltaNet, KDA | l2norm(q) * K^-0.5 | l2norm(k) | v | beta | log-decay |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6
"""Of the l2 norm, in all models."""


def _wide(x: Tensor) -> Tensor:
    """At least float32; float64 stays."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def unit(x: Tensor, eps: float = EPS) -> Tensor:
    """``1 / sqrt(sum(x^2) + eps)`` over the last dimension, which is gone."""
    x = _wide(x)
    return torch.rsqrt((x * x).sum(-1) + eps)


def l2norm(x: Tensor, eps: float = EPS) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension."""
    return _wide(x) * unit(x, eps)[..., None]


def delta_qk(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised and scaled query and normalised key of the delta rules; ``q, k: [..., K]`` before the norm."""
    return l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)


def gdn_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Log-decay of Gated DeltaNet: ``-exp(A_log) * softplus(a + dt_bias)``; ``a: [..., HV]``, parameters ``[HV]``."""
    return -_wide(A_log).exp() * F.softplus(_wide(a) + _wide(dt_bias))


def kda_gate(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """Log-decay of KDA, per channel; ``x, dt_bias: [..., H, K]``, ``A_log: [H]``.

    Without a lower bound (Kimi-Linear) ``-exp(A_log) * softplus(x + dt_bias)``; with one (Kimi-K3, GLM-5.3: -5)
    ``lower_bound * sigmoid(exp(A_log) * (x + dt_bias))``, which lies in ``(lower_bound, 0)``.
    """
    rate, x = _wide(A_log).exp()[..., None], _wide(x) + _wide(dt_bias)
    if lower_bound is None:
        return -rate * F.softplus(x)
    if lower_bound >= 0:
        raise ValueError(f"kda_gate: lower_bound must be negative, it bounds a log-decay; got {lower_bound}")
    return lower_bound * torch.sigmoid(rate * x)


def mamba2_dt(
    dt: Tensor, dt_bias: Tensor | None = None, *, softplus: bool = True, limit: tuple[float, float] | None = None
) -> Tensor:
    """Step size of Mamba-2: ``softplus(dt + dt_bias)``, clamped to ``limit`` where one is given; ``dt: [..., HV]``."""
    dt = _wide(dt)
    if dt_bias is not None:
        dt = dt + _wide(dt_bias)
    if softplus:
        dt = F.softplus(dt)
    return dt if limit is None else dt.clamp(*limit)


def mamba2_output(o: Tensor, x: Tensor, D: Tensor | None = None, z: Tensor | None = None) -> Tensor:
    """What Mamba-2 does with the read-out: ``(o + D * x) * silu(z)``, each part only where given.

    ``o, x, z: [..., HV, V]``; ``D: [HV]`` or ``[HV, V]``. Returns x's dtype.
    """
    y = _wide(o)
    if D is not None:
        y = y + _wide(x) * (_wide(D) if D.dim() == 2 else _wide(D)[:, None])
    if z is not None:
        y = y * F.silu(_wide(z))
    return y.to(x.dtype)
