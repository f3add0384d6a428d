"""Positions of a training in its data, and how to go on from one; plain values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, final

import torch

from accelerate_ckpt.data import Cut, LoaderLayout
from accelerate_ckpt.data._layout import BATCHES
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, FileFailure
from ckpt_core.state import decode, encode
from ckpt_core.types import DataPosition


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far into its data a training is; the same on every rank.

    Attributes:
        step: optimizer steps done.
        epoch: the number of the epoch.
        batches: batches of that epoch trained on, as its loader counts them.
        length: batches in that epoch; None if nobody knows.
        cuts: what its loader left out of each order, because ranks or batches changed within the epoch.
        layout: how its loader deals out samples.
        accumulation: batches for one optimizer step.
        ranks: ranks that train.
        samples: samples in an optimizer step.
    """

    step: int
    epoch: int
    batches: int
    length: int | None
    cuts: Sequence[Cut]
    layout: LoaderLayout
    accumulation: int
    ranks: int
    samples: int

    @property
    def complete(self) -> bool:
        """Whether every batch of the epoch was trained on."""
        return self.length is not None and self.batches >= self.length

    def done(self, whole: int | None) -> list[int]:
        """Return how much of each order was trained on.

        Args:
            whole: how much there is in one order, if that is known; its last batch may be filled up.
        """
        taken = self.layout.taken(self.batches * self.layout.fetches)
        cuts = self.cuts or [(0, 0)] * len(taken)
        done = [here + tail - head for here, (head, tail) in zip(taken, cuts, strict=True)]
        if whole is None or len(done) > 1:
            return done
        return [whole if self.complete else min(done[0], whole)]

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks} with {self.samples} samples in a step"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class DataProgress:
    """What a checkpoint holds of one rank's progress.

    Attributes:
        position: the same on every rank.
        start: what the order of the epoch is drawn from.
        evaluated: names of the evaluation loaders whose workers live on.
        loss: the sum that is not logged yet, and the step up to which it is.
        order: what makes the order, and of how many samples.
    """

    position: Position
    start: Mapping[str, Any]
    evaluated: Sequence[str]
    loss: tuple[torch.Tensor, int]
    order: Mapping[str, Any]

    @classmethod
    def read(cls, content: bytes, path: str) -> Self:
        """Return what is in a file.

        Raises:
            CorruptCheckpointError: it is none, or of another version.
        """
        try:
            fields = decode(json.loads(content))
            position = fields.pop("position")
            layout = LoaderLayout(**position.pop("layout"))
            return cls(position=Position(**position, layout=layout), **fields)
        except (CheckpointError, AttributeError, KeyError, TypeError, ValueError) as error:
            failure = FileFailure(path=path, problem=f"it is no progress of a training ({error!r:.200})")
            raise CorruptCheckpointError(str(failure), failures=(failure,)) from error

    def written(self) -> bytes:
        """Return the content of that file."""
        return json.dumps(encode(asdict(self))).encode()

    def in_samples(self) -> DataPosition:
        """Return the position, counted in samples of all ranks."""
        position, of = self.position, self.order["samples"]
        size = position.layout.batch_size if position.layout.unit == BATCHES else 1
        done = of if of is not None and position.complete else sum(position.done(None)) * size
        return DataPosition(epoch=position.epoch, samples=done if of is None else min(done, of), of=of)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """How a resumed training goes on in its data.

    Attributes:
        epoch: the epoch that it begins with.
        skip: batches of that epoch that the Trainer skips: whole accumulation windows, or all.
        cuts: what the loader leaves out of each order of that epoch.
        done: how much of it was trained on before.
        again: whether the epoch begins again, because what was trained on cannot be told from the rest.
    """

    epoch: int
    skip: int = 0
    cuts: Sequence[Cut] = ()
    done: int = 0
    again: bool = False


def continuation(
    position: Position, now: LoaderLayout, accumulation: int, *, whole: int | None, batches: int = 0
) -> Continuation:
    """Return how to go on from a position.

    Args:
        position: as it was saved.
        now: how the loader deals out samples.
        accumulation: batches for one optimizer step, now.
        whole: how much there is in the order of an epoch, if that is known.
        batches: in a whole epoch now; the data set may have grown since one that is complete.
    """
    if position.batches == 0:
        return Continuation(epoch=position.epoch)
    done = position.done(whole)
    if (now, accumulation) == (position.layout, position.accumulation):
        grown = position.complete and not position.cuts
        skip = max(position.batches, batches if grown else 0)
        return Continuation(epoch=position.epoch, skip=skip, cuts=position.cuts, done=sum(done))
    if not now.goes_on_from(position.layout, len(done)):
        return Continuation(epoch=position.epoch, again=True)
    skip = sum(done) // (now.per_step * accumulation) * accumulation
    while any(head > tail for head, tail in zip(now.taken(skip * now.fetches), done, strict=True)):
        skip -= accumulation
    if skip == 0 and position.complete:
        return Continuation(epoch=position.epoch + 1)  # too few samples for a single step
    cuts = list(zip(now.taken(skip * now.fetches), done, strict=True))
    return Continuation(epoch=position.epoch, skip=skip, cuts=cuts, done=sum(done))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What the Trainer computes from the length of its loader, before it trains.

    Attributes:
        epochs: epochs in all.
        per_epoch: optimizer steps in one.
        batches: in one epoch.
        total: optimizer steps in all.
    """

    epochs: int
    per_epoch: int
    batches: int
    total: int

    def after(
        self, position: Position, chosen: Continuation, first: Steps, accumulation: int, *, fixed: bool
    ) -> Steps:
        """Return the numbers for a training that was resumed.

        Args:
            position: as it was saved.
            chosen: how it goes on.
            first: the numbers for a training of nothing but epochs like the resumed one.
            accumulation: batches for one optimizer step.
            fixed: whether the number of steps is given; else it follows from that of epochs.
        """
        left = 0 if chosen.skip >= first.batches else first.per_epoch - chosen.skip // accumulation
        if fixed and left and position.step >= self.total:  # the stock Trainer makes one step more
            return replace(self, epochs=chosen.epoch + bool(chosen.done))  # for the end of that epoch
        if fixed:
            more = math.ceil((self.total - position.step - left) / self.per_epoch)
            return replace(self, epochs=chosen.epoch + 1 + more)
        return replace(self, total=position.step + left + self.total - (chosen.epoch + 1) * self.per_epoch)


def note(before: Position, now: Position, chosen: Continuation, steps: Steps, *, rest: str) -> str:
    """Return what a change of ranks, batches or accumulation comes to.

    Args:
        before: the position that was saved.
        now: the same, with what has changed.
        chosen: how training goes on.
        steps: of the resumed training.
        rest: what becomes of the epoch, where samples of it are done.
    """
    data = rest if chosen.done else f"begins epoch {chosen.epoch}"
    if chosen.again:
        data = (
            f"begins epoch {chosen.epoch} again, as what was seen of it cannot be told from the rest for "
            "this number of ranks and workers, or for these batches"
        )
    return (
        f"step {before.step} was saved by {before}, and is resumed by {now}: it {data}. Training ends at "
        f"step {steps.total}; the learning rate is scheduled for that many, and stepped once in each"
    )
