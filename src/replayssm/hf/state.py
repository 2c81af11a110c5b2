"""What a :class:`ReplayCache` keeps of the recurrent layers, and how the calls of a forward become steps of a pool.

A *step* is one forward of the model. It opens when a layer that the last step has already run is called again, and
then the last step's tokens are committed: until then :meth:`RecurrentState.crop` takes them back by not committing
them. Of the ``T`` new tokens the last ``replayed`` go through the ring; those before them, if any, are *absorbed* by
the checkpoint through the model's own multi-token function. All rows of a batch advance together, so that every count
is a host int here and no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replayssm import ops
from replayssm.hf.handle import refuse_gradient
from replayssm.hf.options import Options
from replayssm.hf.window import Window
from replayssm.layer import LayerSpec, LayerState
from replayssm.pool import StatePool

DRAFT_WINDOW = 24
"""The window where none was asked for and the cache has to record: generate's default of 20 drafts fits."""


@dataclass
class Step:
    """One forward. ``first``: nothing came before it. ``tokens`` and ``replayed`` are known from the first layer on.
    lent: convolution states given to mixers, which update them in place with one token."""

    first: bool
    tokens: int = 0
    replayed: int = 0
    folded: bool = False
    done: set[int] = field(default_factory=set)
    lent: dict[int, Tensor] = field(default_factory=dict)


class RecurrentState:
    """The pool behind one cache: slot ``b`` is row ``b`` of the batch.

    layers: indices of the recurrent layers. dt_limits: the limit that a layer's model puts on Mamba-2's dt in prefill.
    recording: set by the cache; the last ``window`` tokens must stay croppable. draft_window: the window where none was
    asked for and the cache records.
    """

    def __init__(self, layers: Sequence[int], options: Options, dt_limits: Mapping[int, tuple[float, float]]) -> None:
        self.layers, self.options, self.dt_limits = tuple(layers), options, dict(dt_limits)
        self.recording = False
        self.draft_window = DRAFT_WINDOW
        self.pool: StatePool | None = None
        self.keep = 0  # tokens that folds leave in the ring
        self.specs: dict[int, LayerSpec] = {}
        self.states: dict[int, LayerState] = {}
        self.convs: dict[tuple[int, int], Window] = {}
        self._clear()

    def _clear(self) -> None:
        self.tokens = 0  # of the sequence, the open step's included
        self.step: Step | None = None
        self._committed = 0  # rows in the ring, as the cursors say
        self._pending = 0  # rows of the open step, to be committed at the next
        self._uncommitted = False
        self._back: float = float("inf")  # tokens that the convolution windows can go back

    # A forward, in order: touch, the convolutions, plan, and what the adapters call.

    def touch(self, layer: int) -> Step:
        """Called at each use of a layer; returns the forward's step, opening it at the first."""
        if self.step is None or layer in self.step.done:
            self._close()
            self.step = Step(first=self.tokens == 0)
        return self.step

    def conv(self, x: Tensor, layer: int, index: int, kernel: int) -> Tensor:
        """Records the inputs ``x [B, channels, T]`` of a layer's convolution ``index``, or ``[B, T]`` ids; returns them
        with the inputs before them in front, none of those if this is the sequence's first call."""
        step = self.touch(layer)
        step.lent.pop(layer, None)
        if x.dim() == 3:  # ids may be padded on the left, so they do not tell how many tokens there are
            self.plan(layer, x.shape[-1], x.shape[0], x.device)
        self._ensure(x.shape[0], x.device)
        rows = x if x.dim() == 3 else x[:, None]
        window = self.convs.get((layer, index))
        if window is None:
            past = kernel - 1 if index == 0 else kernel  # a mixer's own convolution has no use for the oldest
            window = self.convs[layer, index] = self._window(rows, past)
        if step.first:
            window.append(rows)
            return x
        full = window.extend(rows)
        return full if x.dim() == 3 else full[:, 0]

    def lend(self, layer: int) -> Tensor | None:
        """The state of a mixer's own convolution, ``[B, channels, kernel]``, to be updated in place by a mixer that has
        one token: the token is read from there. With more it calls :meth:`conv`. None before the first call."""
        step = self.touch(layer)
        window = self.convs.get((layer, 0))
        if window is None or step.first:
            return None
        step.lent[layer] = window.last(window.past + 1)  # the oldest leaves the state before it is read
        return step.lent[layer]

    def peek(self, layer: int, index: int) -> Tensor | None:
        """The last inputs of another convolution, before this forward's; None if there were none."""
        step = self.touch(layer)
        window = self.convs.get((layer, index))
        if window is None or step.first:
            return None
        last = window.last(window.past)
        return last if last.is_floating_point() else last[:, 0]

    def plan(self, layer: int, T: int, B: int, device: torch.device) -> Step:
        """Decides, at the first layer of a forward, which of its ``T`` tokens are replayed, and folds for them."""
        step = self.touch(layer)
        if layer in step.lent and T == 1:  # its mixer has computed with the lent state: the token is the last column
            self.convs[layer, 0].append(step.lent.pop(layer)[..., -1:])
        if step.tokens:
            if step.tokens != T:
                raise RuntimeError(f"ReplayCache: layer {layer} got {T} tokens in a forward of {step.tokens}")
            return step
        self._ensure(B, device)
        self._open(step, T)
        self.tokens += T
        return step

    def _window(self, x: Tensor, past: int) -> Window:
        """For a convolution's inputs ``x [B, channels, T]``, ``past`` of which a step reads before its own."""
        return Window(x.shape[0], x.shape[1], past, self.keep, x.dtype, x.device)

    def _open(self, step: Step, T: int) -> None:
        """How a step of ``T`` tokens goes; folds for it."""
        ring = self._pool.ring
        replay = T == 1 or (ring.most >= T and not step.first)
        step.tokens, step.replayed = T, T if replay else min(self.keep, T)
        if step.replayed < T or ring.window < T:
            self._fold(self._committed)
            step.folded = True
        elif 0 < self.keep <= ring.limit and self._due:  # rather than the fold of all rows
            self._fold(self._committed - self.keep)
        self._uncommitted, self._pending = step.replayed > 0, step.replayed
        self._back = min(self._back + T, self._cap)

    def layer(self, layer: int, spec: LayerSpec) -> LayerState:
        """The layer's memory, allocated at its first call."""
        known = self.specs.get(layer)
        if known is None:
            with torch.inference_mode(False):
                self.states[layer] = self._pool.add_layer(spec)
            self.specs[layer] = spec
        elif known != spec:
            raise ValueError(
                f"ReplayCache: layer {layer} is of another model than the cache was filled by: expected {known}; "
                f"got {spec}"
            )
        return self.states[layer]

    def verify(self, layer: int, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor) -> Tensor:
        """Replays the step's last tokens; see :func:`replayssm.ops.verify`."""
        refuse_gradient(q, k, v, w, g)
        assert self.step is not None
        folded = self.step.folded and self.step.replayed > self._pool.ring.window
        state, backend = self.states[layer], self._pool.backend
        return ops.verify(state, q, k, v, w, g, slots=self.slots, folded=folded, backend=backend)

    def seed(self, layer: int, state: Tensor) -> None:
        """The model's own function has absorbed tokens: its new state ``[B, HV, V, K]`` becomes the checkpoint."""
        ops.seed(self.states[layer], state.detach(), self.slots)

    def finish(self, layer: int, step: Step) -> None:
        """The layer is through."""
        step.done.add(layer)

    # Between forwards.

    @property
    def croppable(self) -> int:
        """How many of the last tokens :meth:`crop` can take back now."""
        rows = self._pending + (0 if self._uncommitted and self._due else self._committed)
        return int(min(rows, self._back, self._cap))

    def check_crop(self, n: int) -> None:
        """Raises ValueError where the last ``n`` tokens cannot be taken back."""
        self.check_complete()
        if n > self.croppable:
            raise ValueError(
                f"ReplayCache.crop: {n} tokens to remove, but only the last {self.croppable} of {self.tokens} can "
                f"still be taken back; attach the model with window={n} or more to always keep that many"
            )

    def crop(self, n: int) -> None:
        """Takes back the last ``n <= croppable`` tokens."""
        drafts = min(n, self._pending)
        self._pending -= drafts
        if n > drafts:
            self._commit()
            self._pool.rewind(self.slots, n - drafts)
            self._committed -= n - drafts
        for window in self.convs.values():
            window.rewind(n)
        self._back = min(self._back, self._cap) - n
        self.tokens -= n

    def select(self, rows: Tensor) -> None:
        """Row ``b`` becomes a copy of row ``rows[b]``; the batch may grow or shrink."""
        self.check_complete()
        if self.pool is None:
            return
        src = rows.to(device=self.slots.device, dtype=torch.int32)
        for window in self.convs.values():
            window.select(src)
        if src.numel() != self.pool.N:
            self._rebuild(src.numel(), src)
            return
        dst = self.slots
        if src.device.type == "cpu":  # most beams stay where they are; looking costs nothing here
            moved = src != dst
            src, dst = src[moved], dst[moved]
        self.pool.copy(src, dst)

    def reset(self) -> None:
        """Forgets the sequence; the memory stays."""
        if self.pool is not None:
            self.pool.reset(self.slots)
        for window in self.convs.values():
            window.reset()
        self._clear()

    # The pool.

    @property
    def purpose(self) -> str:
        """What the window is for."""
        return "asked for" if self.options.window else "recording" if self.keep else "plain decoding"

    @property
    def nbytes(self) -> int:
        """Bytes of checkpoints, rings, cursors and convolution windows."""
        windows = sum(window.x.numel() * window.x.element_size() for window in self.convs.values())
        return windows + (0 if self.pool is None else self.pool.nbytes)

    @property
    def _pool(self) -> StatePool:
        assert self.pool is not None
        return self.pool

    @property
    def _due(self) -> bool:
        """:meth:`replayssm.ring.Ring.due` of the committed rows: verify folds them all."""
        return self._committed > self._pool.ring.limit

    @property
    def _cap(self) -> float:
        return min((window.spare for window in self.convs.values()), default=float("inf"))

    @property
    def _wanted(self) -> int:
        """How many of the last tokens are to be kept from now on."""
        return max(self.options.window or 0, self.draft_window if self.recording else 0)

    def _ensure(self, B: int, device: torch.device) -> StatePool:
        """The pool, built for ``B`` rows at the first call, and with a window that suits recording."""
        keep = self._wanted
        if self.pool is None or (self.pool.N != B and self.tokens == 0):
            self.keep = keep
            self._build(B, device)
            self.convs.clear()
        self.check_batch(B)
        if self.slots.device != device:
            raise ValueError(
                f"ReplayCache: this cache is on {self.slots.device}, a layer's inputs on {device}; a model spread over "
                "several devices is not supported"
            )
        if keep > self.keep and self.step is not None and not self.step.tokens:
            self._fold(self._committed)
            self.keep = keep
            self._rebuild(B, None)
            self.convs = {key: window.resized(keep) for key, window in self.convs.items()}
        return self._pool

    def check_batch(self, B: int) -> None:
        """Raises ValueError where the cache holds another number of sequences."""
        if self.pool is not None and self.tokens and self.pool.N != B:
            raise ValueError(
                f"ReplayCache: expected a batch of {self.pool.N}, the sequences in this cache; got a batch of {B}. "
                "Use a new cache, reset() this one, or batch_repeat_interleave / batch_select_indices"
            )

    def check_complete(self) -> None:
        """Raises RuntimeError where the last forward was not finished."""
        step = self.step
        missing = set(self.layers) - step.done if step is not None and step.tokens else ()
        if missing:
            raise RuntimeError(
                f"ReplayCache: the last forward stopped before the recurrent layers {sorted(missing)} were through, so "
                "this cache is between two tokens; reset() it or use a new one"
            )

    def _build(self, N: int, device: torch.device) -> None:
        """Empty memory for the layers known so far."""
        with torch.inference_mode(False):
            self.pool = StatePool(
                N,
                fold_every=self.options.folds + self.keep,
                window=max(self.keep, 1),
                width=1,  # convolutions are kept apart: see Window
                device=device,
                backend=self.options.backend,
                stagger=False,  # all rows' counts are one host int here
            )
            self.slots = torch.arange(N, dtype=torch.int32, device=device)
            self.states = {layer: self.pool.add_layer(spec) for layer, spec in self.specs.items()}

    def _rebuild(self, N: int, rows: Tensor | None) -> None:
        """A pool of ``N`` slots with the rows ``rows`` of this one; None: all of them, into one of another window,
        where the rings must be empty."""
        old, states, slots = self._pool, self.states, self.slots
        self._build(N, slots.device)
        src = slots if rows is None else rows
        with torch.inference_mode(False), torch.no_grad():
            if rows is not None:
                self._pool.ring.put(self.slots, *old.ring.at(src))
            for layer, state in self.states.items():
                for name, x in state.tensors.items():
                    if rows is not None or name == "ckpt":
                        x.copy_(states[layer].tensors[name][src.long()])

    def _fold(self, n: int) -> None:
        if n:
            self._pool.fold(self.slots, n)
            self._committed -= n

    def _commit(self) -> None:
        """Moves the cursors past the open step's tokens."""
        if self._uncommitted:
            self._pool.commit(self.slots, self._pending)
            self._committed = (0 if self._due else self._committed) + self._pending
            self._uncommitted, self._pending = False, 0

    def _close(self) -> None:
        """Ends the last step."""
        self.check_complete()
        if self.step is not None:
            self._commit()
