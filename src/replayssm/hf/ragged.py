"""A :class:`ReplayCache` whose rows advance by different numbers of tokens, as they do when each row accepts its own
drafts.

The ring's cursors are one pair a row anyway. Convolution windows get a cursor for each row. Keys and values stay what
models know from left-padded batches: what a row takes back more than the others is cut out by moving the row to the
right, so that its padding grows, and columns that are padding in every row are dropped. So no mask of a model, sliding
or sparse, ever meets a hole in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from replayssm.backends import for_trees
from replayssm.hf.cache import ReplayCache
from replayssm.hf.handle import PathHandle
from replayssm.hf.state import RecurrentState, Step
from replayssm.hf.window import Window
from replayssm.pool import StatePool
from replayssm.tree import move_columns, tree_windows, verify_tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RaggedWindow(Window):
    """A window with a cursor for each row: row ``b``'s next input goes to column ``ends[b] % C``."""

    def __init__(self, B: int, channels: int, past: int, keep: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(B, channels, past, keep, dtype, device)
        self.ends = torch.zeros(B, dtype=torch.long, device=device)

    def last(self, n: int) -> Tensor:
        """A copy of the ``n <= C`` inputs of each row before its next."""
        return self.x.gather(2, self._columns(self.ends - n, n))

    def extend(self, new: Tensor) -> Tensor:
        """Appends ``new [B, channels, T]``; returns it with the ``past`` inputs before it in front."""
        full = torch.cat([self.last(self.past), new], -1)
        self.append(new)
        return full

    def append(self, new: Tensor) -> None:
        """Records ``new [B, channels, T]``; of more than C inputs the last."""
        kept = min(self.x.shape[2], new.shape[2])
        self.ends = self.ends + new.shape[2]
        self.x.scatter_(2, self._columns(self.ends - kept, kept), new.detach()[..., new.shape[2] - kept :])

    def take_back(self, n: Tensor) -> None:
        """Takes the last ``n [B]`` inputs back."""
        self.ends = self.ends - n

    def take_path(self, source: Tensor, T: int) -> None:
        """Of the last ``T`` inputs, number ``i`` of row ``b`` becomes what ``source[b, i]`` was."""
        last = self.last(T).gather(2, source[:, None].expand(-1, self.x.shape[1], -1))
        self.x.scatter_(2, self._columns(self.ends - T, source.shape[1]), last)

    def select(self, rows: Tensor) -> None:
        """Row ``b`` becomes a copy of row ``rows[b]``."""
        super().select(rows)
        self.ends = self.ends[rows]

    def reset(self) -> None:
        """Zeros before the first input."""
        super().reset()
        self.ends = torch.zeros_like(self.ends)

    def _columns(self, start: Tensor, n: int) -> Tensor:
        """Columns ``[B, channels, n]`` of ``n`` inputs from ``start [B]`` on."""
        at = (start[:, None] + torch.arange(n, device=start.device)) % self.x.shape[2]
        return at[:, None].expand(-1, self.x.shape[1], -1)


class RaggedState(RecurrentState):
    """Counts by row, on the host beside the cursors on the device, so that no step has to read these.

    window: the most tokens of a step that can be rejected. back: how many tokens of earlier steps can be as well.
    A first step, and one of more tokens than ``window``, is absorbed as a whole: it cannot be taken back.
    """

    def __init__(self, layers: list[int], attachment: Any, window: int, back: int) -> None:
        self.window, self.back = window, back
        super().__init__(layers, attachment.options, attachment.dt_limits)

    def _clear(self) -> None:
        super()._clear()
        self.parents: Tensor | None = None  # of the next step's tokens, where they are a tree
        self._rows = self._drafts = torch.zeros(0, dtype=torch.long)  # committed, and of the open step; [B] once known

    def _ensure(self, B: int, device: torch.device) -> StatePool:
        pool = super()._ensure(B, device)
        if self._rows.numel() == 0:
            self._rows = self._drafts = torch.zeros(B, dtype=torch.long)
        return pool

    @property
    def purpose(self) -> str:
        """See the base."""
        return "drafts, each row its own"

    @property
    def _wanted(self) -> int:
        return 0  # what base keeps for all rows alike; here _open keeps ``back``

    def _build(self, N: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.pool = StatePool(
                N, fold_every=self.options.folds + self.back, window=self.window, width=1, device=device,
                backend=self.options.backend, stagger=False,  # _rows follows the cursors
            )  # fmt: skip
            self.slots = torch.arange(N, dtype=torch.int32, device=device)
            self.states = {layer: self.pool.add_layer(spec) for layer, spec in self.specs.items()}

    def _window(self, x: Tensor, past: int) -> Window:
        return RaggedWindow(x.shape[0], x.shape[1], past, self.window + self.back, x.dtype, x.device)

    def _open(self, step: Step, T: int) -> None:
        ring, B = self._pool.ring, self._pool.N
        step.tokens, step.replayed = T, T if T == 1 or (ring.window >= T and not step.first) else 0
        if step.replayed == 0:
            self._absorb(self._rows)
        elif self.back:  # rather than the fold of all rows that verify would do
            self._absorb(torch.where(self._rows > ring.limit, self._rows - self.back, 0))
        self._uncommitted = step.replayed > 0
        self._drafts = torch.full((B,), step.replayed)

    def conv(self, x: Tensor, layer: int, index: int, kernel: int) -> Tensor:
        """See the base; of a tree, the inputs of each token's path."""
        full = super().conv(x, layer, index, kernel)
        if self.parents is not None:
            if index or x.dim() != 3:
                raise ValueError("replayssm: trees are not supported where a layer has several convolutions")
            past = full.shape[2] - x.shape[2]
            return PathHandle(tree_windows(full[..., :past], x, self.parents.to(x.device)))  # pyright: ignore
        return full

    def verify(self, layer: int, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor) -> Tensor:
        """See the base; a tree where the step is one."""
        if self.parents is None:
            return super().verify(layer, q, k, v, w, g)
        backend = for_trees(self.options.backend)
        return verify_tree(
            self.states[layer], q, k, v, w, g, self.parents.to(q.device), slots=self.slots, backend=backend
        )

    def take_path(self, source: Tensor) -> None:
        """The step's tokens ``source [B, P]`` (int64, on the CPU; ascending) become its first ones."""
        self.check_complete()
        T = int(self._drafts[0])
        step = torch.arange(T)
        order = torch.cat([source, step[source.shape[1] :].expand(source.shape[0], -1)], 1).to(self.slots.device)
        end = torch.stack(self._pool.ring.at(self.slots)).sum(0)[:, None]
        step, R = step.to(self.slots.device), self._pool.ring.R
        for state in self.states.values():
            for x in (state.k, state.d, state.w, state.g):
                move_columns(x, 2, self.slots, (end + order) % R, (end + step) % R)
        for window in self.convs.values():
            assert isinstance(window, RaggedWindow)
            window.take_path(order, T)

    def _absorb(self, n: Tensor) -> None:
        if n.any():
            self._pool.fold(self.slots, n.to(self.slots))
            self._rows = self._rows - n

    def _commit(self) -> None:
        if self._uncommitted:
            self._pool.commit(self.slots, self._drafts.to(self.slots))
            self._rows = torch.where(self._rows > self._pool.ring.limit, 0, self._rows) + self._drafts
            self._uncommitted, self._drafts = False, torch.zeros_like(self._drafts)

    @property
    def croppable(self) -> int:
        """How many of the last tokens every row can take back now."""
        due = self._rows > self._pool.ring.limit if self._uncommitted and self.pool is not None else False
        kept = self._rows.masked_fill(torch.as_tensor(due), 0) + self._drafts
        return int(min(int(kept.min()), self._cap))

    def take_back(self, n: Tensor) -> None:
        """Takes back the last ``n [B]`` (int64, on the CPU) tokens of each row. Raises ValueError, changing nothing,
        where one of them is not in the ring any more."""
        self.check_complete()
        drafts = torch.minimum(n, self._drafts)
        more = n - drafts
        kept = self._rows.masked_fill(torch.as_tensor(self._uncommitted) & (self._rows > self._pool.ring.limit), 0)
        if bool((more > kept).any() or (n < 0).any() or (n > self._cap).any()):
            raise ValueError(
                f"RaggedCache.take_back: {n.tolist()} tokens, but of the rows only the last "
                f"{(kept + self._drafts).tolist()} can be taken back"
            )
        self._drafts = self._drafts - drafts
        if more.any():
            self._commit()
            self._pool.rewind(self.slots, more.to(self.slots))
            self._rows = self._rows - more
        for window in self.convs.values():
            assert isinstance(window, RaggedWindow)
            window.take_back(n.to(window.ends.device))

    def select(self, rows: Tensor) -> None:
        """Row ``b`` becomes a copy of row ``rows[b]``; the batch may grow or shrink."""
        known, index = self.pool is not None, rows.cpu().long()
        super().select(rows)
        if known:
            self._rows, self._drafts = self._rows[index], self._drafts[index]


class RaggedCache(ReplayCache):
    """A cache for an attached ``model`` whose rows take tokens back one by one; see :class:`RaggedState` for ``window``
    and ``back``. It is driven by :class:`replayssm.hf.runner.Runner`, which knows the rows' padding."""

    recurrent: RaggedState

    def __init__(self, model: PreTrainedModel, window: int, back: int = 0) -> None:
        self._geometry = window, back
        super().__init__(model)

    def _make_state(self, layers: list[int], attachment: Any) -> RecurrentState:
        return RaggedState(layers, attachment, *self._geometry)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: rows take back their own numbers of tokens, through the runner."""
        raise RuntimeError("RaggedCache: tokens are taken back by replayssm.hf.runner.Runner.take_back")


def keep_whole(cache: Cache) -> None:
    """Sliding layers keep all keys from now on: which ones are in a row's window depends on what it takes back."""
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicSlidingWindowLayer):
            cache.layers[i] = DynamicLayer()


def take_columns_back(cache: Cache, columns: int, pads: Tensor, n: Tensor) -> tuple[int, Tensor]:
    """Takes back each row's last ``n [B]`` columns of all keys and values, of which there are ``columns``; the first
    ``pads [B]`` are padding. Returns what there is then."""
    right = n - n.min()
    keep, lead = columns - int(n.min()), int((pads + right).min())
    shift_attention(cache, keep, right, lead)
    return keep - lead, pads + right - lead


def shift_attention(cache: Cache, keep: int, right: Tensor, lead: int) -> None:
    """Of all keys and values the first ``keep`` columns stay; row ``b`` moves ``right[b]`` columns to the right, over
    the end; then the first ``lead`` columns are dropped. What moves in on the left is padding."""
    index: dict[torch.device, Tensor] = {}

    def moved(x: Tensor, batch: int, column: int) -> Tensor:
        if lead == 0 and not right.any():
            return x.narrow(column, 0, keep)
        if x.device not in index:
            index[x.device] = torch.arange(lead, keep, device=x.device) - right.to(x.device)[:, None]
        at = index[x.device]
        shape = [1] * x.dim()
        shape[batch], shape[column] = at.shape
        size = list(x.shape)
        size[column] = at.shape[1]
        at = at.view(shape)
        return x.gather(column, at.clamp(min=0).expand(size)).masked_fill(at < 0, 0)

    for layer in cache.layers:
        extra: Any = layer
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            extra.keys, extra.values = moved(extra.keys, 0, 2), moved(extra.values, 0, 2)
        if getattr(layer, "indexer_keys", None) is not None:
            extra.indexer_keys = moved(extra.indexer_keys, 0, 1)
        if getattr(layer, "indexer_position_ids", None) is not None:
            extra.indexer_position_ids = moved(extra.indexer_position_ids, 1, 2)
