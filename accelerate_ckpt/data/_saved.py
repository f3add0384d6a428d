"""The saved position of a data loader, and what follows for its epoch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch.utils.data import RandomSampler, SequentialSampler

from accelerate_ckpt.data._layout import BATCHES, SAMPLES, LoaderLayout, length, order_of, padding
from ckpt_core.state import rng_state
from ckpt_core.types import DataPosition


@final
@dataclass(kw_only=True, slots=True)
class Reentry:
    """Re-entry after a load: the saved random state, until a loader goes on from it.

    Attributes:
        rng: the saved random state; None once it was put back.
        at_edge: the loaders that go on from it if none was saved within an epoch.
    """

    rng: Mapping[str, Any] | None
    at_edge: Collection[Any]

    def take(self) -> Mapping[str, Any]:
        """Return the saved random state the first time, and then the present one."""
        rng, self.rng = self.rng, None
        return rng_state() if rng is None else rng


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A saved position of one loader.

    Attributes:
        index: the loader's place in the order of preparation.
        position: as it was saved.
        layout: how batches are dealt out now.
        same_ranks: whether the position is of this rank, among as many ranks.
        sampler: what the order was drawn from, if not from the loader's present sampler.
    """

    index: int
    position: Mapping[str, Any]
    layout: LoaderLayout
    same_ranks: bool
    sampler: Any = None

    @property
    def start(self) -> dict[str, Any]:
        """What the order of the epoch is drawn from."""
        return dict(self.position["start"])

    @property
    def batches(self) -> int:
        """Number of batches that this rank had of the epoch, if `as_saved`."""
        return int(self.position.get("batches", 0))

    @property
    def taken(self) -> Sequence[int]:
        """How much of each order was dealt out to all ranks."""
        return list(self.position.get("taken", ()))

    @property
    def left(self) -> bool:
        """Whether the loop over the epoch had been left before the save."""
        return bool(self.position.get("left"))

    @property
    def as_saved(self) -> bool:
        """Whether batches are dealt out as in the whole epoch until the save."""
        before = self.position.get("layout")
        return (
            self.same_ranks
            and not self.position.get("rest")
            and (before is None or LoaderLayout(**before) == self.layout)
        )

    def drawn_from(self, skipped: int) -> Mapping[str, Any] | None:
        """Return what the samples in hand were drawn from, if just those are not skipped."""
        as_seen = self.as_saved and skipped == self.batches
        return self.position.get("before") if as_seen else None

    @property
    def has_state(self) -> bool:
        """Whether a stateful loader can go on from its own state."""
        return self.as_saved and self.position["state"] is not None

    @property
    def can_be_rest(self) -> bool:
        """Whether the rest of the epoch is known as a part of its order."""
        before = self.position.get("layout", {})
        unit = before.get("unit")
        if unit == BATCHES and before["batch_size"] != self.layout.batch_size:
            return False  # they are other batches
        return bool(unit) and unit == self.layout.unit and len(self.taken) == self.layout.streams

    def is_rest(self, *, copy: bool, stateful: bool) -> bool:
        """Return whether what iterates begins behind what was taken.

        A copy that skips batches does if its own number has another meaning now, a stateful loader always.
        """
        wanted = (not self.as_saved or self.sampler is not None) if copy else stateful
        return wanted and self.can_be_rest

    def set_remainder(self, loader: Any, original: Any) -> None:
        """Set the number of samples in the last step, as stock does for a whole epoch."""
        whole = length(original)
        if loader.remainder >= 0 and whole is not None and self.layout.unit == SAMPLES:
            loader.remainder = (whole - sum(self.taken)) % self.layout.per_step

    def note_on_end(self) -> str:
        """Describe what a stateful loader hands out next, whatever the script counts."""
        epoch = self.position["iteration"]
        return (
            f"data loader {self.index} was saved at the last batch of epoch {epoch - 1}: it goes on with "
            f"epoch {epoch}, which a loop that begins epoch {epoch - 1} again takes for that"
        )

    def notes(self, loader: Any) -> list[str]:
        """Return what becomes of the epoch, if its order or its batches are others now."""
        return [*self._notes_on_order(loader), *([] if self.as_saved else self._notes_on_layout(loader))]

    def _notes_on_order(self, loader: Any) -> list[str]:
        """Tell of a data set or a sampler that was changed within the epoch."""
        before, now = self.position.get("order"), order_of(loader)
        if before is None or before == now:
            return []
        before_layout = self.position["layout"]
        seen = sum(self.taken) * (before_layout["batch_size"] if before_layout["unit"] == BATCHES else 1)
        return [
            f"data loader {self.index}, within epoch {self.position['iteration']}: "
            + change_of_order(before, now, seen)
        ]

    def _notes_on_layout(self, loader: Any) -> list[str]:
        epoch = self.position["iteration"]
        if not self.can_be_rest:
            return [
                f"data loader {self.index} was saved within epoch {epoch}, and what was seen of it cannot be "
                "told for this number of ranks and workers, or for these batches: of the rest of this epoch, "
                "samples may be seen twice or never"
            ]
        seen, whole, unit = sum(self.taken), length(loader), self.layout.unit
        if whole is None:
            return [f"data loader {self.index} goes on in epoch {epoch} behind the {seen} {unit} seen"]
        rest = max(0, whole - seen)
        text = (
            f"data loader {self.index} goes on in epoch {epoch} behind the {seen} of {whole} {unit} seen: "
            f"the {rest} others once each"
        )
        dropped = rest % self.layout.per_step if loader._drop_last else 0
        if dropped:
            text += f", but for the last {dropped}, which drop_last leaves out"
        added = padding(loader, rest)
        if added:
            text += f", and {added} of them twice, which fills up the last batches"
        return [text, *self._note_on_orders_of_ranks(seen, rest), *self._note_on_batch_size()]

    def _note_on_orders_of_ranks(self, seen: int, rest: int) -> list[str]:
        """Tell of an order that stock has each rank draw by itself, in `prepare`."""
        before = LoaderLayout(**self.position["layout"])
        ranks = before.per_fetch // before.batch_size if before.unit == SAMPLES else before.per_fetch
        shuffles = self.position["order"]["type"] == RandomSampler.__qualname__
        if ranks < 2 or not shuffles or not self.start.get("prepared") or self.start.get("seed") is not None:
            return []
        return [
            f"but each of the {ranks} ranks has drawn the order of this epoch by itself, in prepare(), as "
            "stateful loaders with workers do in Accelerate: unless all ranks were seeded alike before it, "
            f"up to {min(seen, rest)} {before.unit} come twice in it and as many never, as without a resume"
        ]

    def _note_on_batch_size(self) -> list[str]:
        before = self.position["layout"]["batch_size"]
        if before == self.layout.batch_size:
            return []
        return [
            f"data loader {self.index} makes batches of {self.layout.batch_size} now, and made batches of "
            f"{before}: learning rate schedules count batches, and go on from their own count"
        ]


def positions_in_samples(positions: Sequence[Mapping[str, Any]]) -> dict[str, DataPosition]:
    """Return saved positions counted in samples of all ranks, of loaders that train."""
    trains = any(position.get("trains") for position in positions)
    found = {
        "dataloader" if len(positions) == 1 else f"dataloader.{index}": _in_samples(position)
        for index, position in enumerate(positions)
        if not trains or position.get("trains")
    }
    return {name: position for name, position in found.items() if position is not None}


def _in_samples(position: Mapping[str, Any]) -> DataPosition | None:
    layout, order = position.get("layout"), position.get("order")
    if layout is None or order is None:
        return None  # untracked, or of an earlier version
    epoch, of = position["iteration"], order["samples"]
    if position.get("ended"):
        return DataPosition(epoch=epoch - 1, samples=of, of=of)
    if not layout["unit"]:
        return DataPosition(epoch=epoch, of=of)
    size = layout["batch_size"] if layout["unit"] == BATCHES else 1
    seen = sum(position["taken"]) * size if position["within"] else 0
    return DataPosition(epoch=epoch, samples=seen if of is None else min(seen, of), of=of)


def change_of_order(before: Mapping[str, Any], now: Mapping[str, Any], seen: int) -> str:
    """Describe what a changed data set or sampler comes to in the middle of an epoch.

    Args:
        before: the saved one, as by `order_of`.
        now: the present one.
        seen: samples that all ranks together were trained on.
    """
    text = f"there were {_described(before)} when it was saved, and are {_described(now)} now"
    if before["type"] == now["type"] == SequentialSampler.__qualname__:
        return f"{text}: those behind the {seen} seen follow in their order, new ones included"
    whole = 2 * seen if now["samples"] is None else now["samples"]
    return (
        f"{text}: of the {seen} samples seen, up to {min(seen, max(0, whole - seen))} are seen twice, and of "
        f"the others up to {min(seen, whole)} never in this epoch. To avoid it, change them between epochs"
    )


def _described(order: Mapping[str, Any]) -> str:
    samples = "an unknown number of" if order["samples"] is None else order["samples"]
    return f"{samples} samples in the order of {order['type']}"
