"""Positions of a training in its data, and how to go on from one; plain values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, final

import torch

from accelerate_ckpt.trainer._cuts import Cut, Intake
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, FileFailure
from ckpt_core.state import decode, encode
from ckpt_core.types import DataPosition


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far into its data a training is.

    Attributes:
        step: optimizer steps done.
        epoch: the number of the epoch.
        batches: batches of that epoch trained on, as its loader counts them.
        length: batches in that epoch; None if nobody knows.
        cuts: what its loader left out of each stream, because ranks or batches changed within the epoch.
        intake: how its loader makes batches.
        accumulation: batches for one optimizer step.
        ranks: ranks that train.
    """

    step: int
    epoch: int
    batches: int
    length: int | None
    cuts: Sequence[Cut]
    intake: Intake
    accumulation: int
    ranks: int

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """Return the position that `asdict` made a value of."""
        fields: dict[str, Any] = {**value, "intake": Intake(**value["intake"])}
        return cls(**fields)

    @property
    def complete(self) -> bool:
        """Whether every batch of the epoch was trained on."""
        return self.length is not None and self.batches >= self.length

    def done(self, samples: int | None) -> list[int]:
        """Return the samples of each stream that were trained on.

        Args:
            samples: in the whole epoch, if that is known; its last batch may be filled up with others.
        """
        cuts = self.cuts or [(0, 0)] * self.intake.streams
        taken = self.intake.taken(self.batches)
        done = [here + tail - head for here, (head, tail) in zip(taken, cuts, strict=True)]
        if samples is None or len(done) > 1:
            return done
        return [samples] if self.complete else [min(done[0], samples)]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class DataProgress:
    """What a checkpoint holds of one rank's progress.

    Attributes:
        position: the same on every rank.
        start: the generators at the start of the epoch.
        generators: those of sampler and dataset, at the same time.
        sampler: what else the order follows from.
        evaluated: names of the evaluation loaders whose workers live on.
        loss: the sum that is not logged yet, and the step up to which it is.
        order: what makes the order, and of how many samples; empty in checkpoints of earlier versions.
    """

    position: Position
    start: Mapping[str, Any]
    generators: Sequence[torch.Tensor | None]
    sampler: Mapping[str, Any]
    evaluated: Sequence[str]
    loss: tuple[torch.Tensor, int]
    order: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """Return the progress that `asdict` made a value of."""
        fields: dict[str, Any] = {**value, "position": Position.of(value["position"])}
        return cls(**fields)

    def in_samples(self) -> DataPosition:
        """Return the position, counted in samples of all ranks."""
        of = self.order.get("samples")
        return DataPosition(epoch=self.position.epoch, samples=sum(self.position.done(of)), of=of)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """How a resumed training goes on in its data.

    Attributes:
        epoch: the epoch that it begins with.
        skip: batches of that epoch that the Trainer skips: whole accumulation windows, or all.
        cuts: what the loader leaves out of each stream of that epoch.
        done: samples trained on before.
        twice: those among them that are seen again, because the loader can only skip batches.
    """

    epoch: int
    skip: int = 0
    cuts: Sequence[Cut] = ()
    done: int = 0
    twice: int = 0


def continuation(
    position: Position, now: Intake, accumulation: int, *, samples: int | None, divisible: bool
) -> Continuation:
    """Return how to go on from a position.

    Args:
        position: as it was saved.
        now: how the loader makes batches.
        accumulation: batches for one optimizer step, now.
        samples: in a whole epoch, if that is known.
        divisible: whether the loader can begin at any sample.
    """
    if position.batches == 0:
        return Continuation(epoch=position.epoch)
    done = position.done(samples)
    if (now, accumulation) == (position.intake, position.accumulation):
        return Continuation(epoch=position.epoch, skip=position.batches, cuts=position.cuts, done=sum(done))
    skip = sum(done) // (now.batch * accumulation) * accumulation
    if not divisible or now.streams != len(done):
        return Continuation(
            epoch=position.epoch, skip=skip, done=sum(done), twice=sum(done) - skip * now.batch
        )
    while any(head > tail for head, tail in zip(now.taken(skip), done, strict=True)):
        skip -= accumulation
    if skip == 0 and position.complete:
        return Continuation(epoch=position.epoch + 1)  # too few samples for a single step
    return Continuation(
        epoch=position.epoch,
        skip=skip,
        cuts=list(zip(now.taken(skip), done, strict=True)),
        done=sum(done),
    )


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


def note(
    before: Position,
    now: Position,
    chosen: Continuation,
    steps: Steps,
    *,
    samples: int | None,
    dropping: bool,
) -> str:
    """Return what a change of ranks, batches or accumulation comes to.

    Args:
        before: the position that was saved.
        now: the same, with what has changed.
        chosen: how training goes on.
        steps: of the resumed training.
        samples: in a whole epoch, if that is known.
        dropping: whether a last batch that is not full is dropped.
    """
    data = f"epoch {chosen.epoch} begins"
    if chosen.done:
        left = None if samples is None else samples - chosen.done
        rest = "the others follow" if left is None else f"the other {left} follow{_end(left, now, dropping)}"
        data = f"{chosen.done} samples of epoch {chosen.epoch} are done, {rest}, in the saved order"
    if chosen.twice:
        data += f"; {chosen.twice} samples are seen twice: its loader can only skip whole batches"
    if chosen.done and before.intake.streams != now.intake.streams:
        data += "; its workers share the dataset in another way, so that some are seen twice, others never"
    return (
        f"step {before.step} was saved by {_describe(before)}, and is resumed by {_describe(now)}: {data}. "
        f"Training ends at step {steps.total}; the learning rate is scheduled for that many, and stepped "
        "once in each"
    )


def _end(left: int, now: Position, dropping: bool) -> str:  # noqa: FBT001 - private
    """Return what becomes of the last batch of an epoch, if it is not full."""
    odd = left % now.intake.batch
    if odd and dropping:
        return f", but for the last {odd}, which fill no batch"
    # What one rank fetches for all is only made divisible by them.
    filled = -odd % (now.intake.batch if now.intake.fetches == 1 else now.ranks)
    if odd and now.ranks > 1 and filled:
        return f", with {filled} of the first again to fill the last batch"
    return ""


def _describe(position: Position) -> str:
    ranks = "1 rank" if position.ranks == 1 else f"{position.ranks} ranks"
    return f"{ranks} with {position.intake.batch * position.accumulation} samples in a step"


def encoded(progress: DataProgress) -> bytes:
    """Return the content of that file."""
    return json.dumps(encode(asdict(progress))).encode()


def decoded(content: bytes, path: str) -> DataProgress:
    """Return the progress that `encoded` made a file of.

    Raises:
        CorruptCheckpointError: it is none, or of another version.
    """
    try:
        return DataProgress.of(decode(json.loads(content)))
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        failure = FileFailure(path=path, problem=f"it is no progress of a training ({error!r:.200})")
        raise CorruptCheckpointError(str(failure), failures=(failure,)) from error
