"""The data of a Trainer's training: where it is, and where a resumed one goes on.

The stock Trainer divides the number of steps by those of an epoch as it would be now: wrong for a stream
without a length, and for any other number of ranks, size of batches or accumulation. `ckpt_core.data` keeps
the position in its loader; here are the numbers that follow from it:

    every fetch                      count batches
    save                             epoch, batches trained on, the position in the loader
    a resume, before the first step  epochs and steps to come, from samples
    the first epoch                  begins behind those samples, from the random numbers of the save
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, final

import torch
import transformers.trainer
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import DataLoader

from accelerate_ckpt._loaders import base_of, fetches_of, position_of
from ckpt_core.data import LoaderPosition, batches_in, hidden_position, in_samples, keeps_iterator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError
from ckpt_core.formats.codec import damage
from ckpt_core.hosting import replaced
from ckpt_core.state import decode, encode
from ckpt_core.types import DataPosition


def progress_file(rank: int | str) -> str:
    """Return the name of the file with the progress of a rank, or a pattern."""
    return f"trainer_progress_{rank}.json"


def generators_file(rank: int | str, ranks: int) -> str:
    """Return the Trainer's name for the file with a rank's random states."""
    return f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far into its data a training is; the same on every rank.

    Attributes:
        batches: those of that epoch trained on, as the Trainer counts them.
        per_batch: samples that all ranks together see in one of them.
        samples: in an optimizer step.
    """

    step: int
    epoch: int
    batches: int
    length: int | None
    per_batch: int
    accumulation: int
    ranks: int
    samples: int

    @property
    def complete(self) -> bool:
        return self.length is not None and self.batches >= self.length

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks} with {self.samples} samples in a step"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class DataProgress:
    """What a checkpoint holds of one rank's progress.

    Attributes:
        loader: the position in its loader; None of one that cannot tell it.
        of: samples in an epoch, if they are known.
        evaluated: positions in the loaders of evaluations whose workers live on.
        loss: the sum that is not logged yet, and the step up to which it is.
    """

    position: Position
    loader: Mapping[str, Any] | None
    of: int | None
    evaluated: Mapping[str, Mapping[str, Any]]
    loss: tuple[torch.Tensor, int]

    @classmethod
    def read(cls, content: bytes, path: str) -> Self:
        try:
            fields = decode(json.loads(content))
            return cls(position=Position(**fields.pop("position")), **fields)
        except (CheckpointError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise damage(path, f"it is no progress of a training ({error!r:.200})") from error

    def written(self) -> bytes:
        return json.dumps(encode(asdict(self))).encode()

    def in_samples(self) -> DataPosition:
        epoch = self.position.epoch
        if self.position.batches == 0:
            return DataPosition(epoch=epoch, samples=0, of=self.of)
        return in_samples(self.loader, of=self.of, epoch=epoch) or DataPosition(epoch=epoch, of=self.of)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """How a resumed training goes on in its data.

    Attributes:
        skip: batches of that epoch that count as done: whole accumulation windows, or all.
        done: samples of that epoch that are not seen again.
        to_come: batches that follow; None if unknown.
    """

    epoch: int
    skip: int = 0
    done: int = 0
    to_come: int | None = None

    @classmethod
    def of(cls, found: Position, now: Position, *, done: int, to_come: int | None) -> Self:
        """Return how to go on from `found` with the batches of `now`."""
        if found.batches == 0:
            return cls(epoch=found.epoch)
        alike = (now.per_batch, now.accumulation) == (found.per_batch, found.accumulation)
        if alike and done:
            return cls(epoch=found.epoch, skip=found.batches, done=done, to_come=to_come)
        skip = done // (now.per_batch * now.accumulation) * now.accumulation
        if not skip and found.complete and done:
            return cls(epoch=found.epoch + 1)  # too few samples for a single step
        return cls(epoch=found.epoch, skip=skip, done=done, to_come=to_come)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What the Trainer computes from the length of its loader, before it trains."""

    epochs: int
    per_epoch: int
    batches: int
    total: int

    def after(
        self, position: Position, chosen: Continuation, first: Steps, accumulation: int, *, fixed: bool
    ) -> Steps:
        """Return the numbers for a training that was resumed.

        `first` has those of a training of nothing but epochs like the resumed one; `fixed` is whether the
        number of steps is given, which else follows from that of epochs.
        """
        left = 0 if chosen.skip >= first.batches else first.per_epoch - chosen.skip // accumulation
        if fixed and left and position.step >= self.total:  # the stock Trainer makes one step more
            return replace(self, epochs=chosen.epoch + bool(chosen.done))  # for the end of that epoch
        if fixed:
            more = math.ceil((self.total - position.step - left) / self.per_epoch)
            return replace(self, epochs=chosen.epoch + 1 + more)
        return replace(self, total=position.step + left + self.total - (chosen.epoch + 1) * self.per_epoch)

    def with_rest(self, chosen: Continuation, accumulation: int) -> Steps:
        if chosen.to_come is None:
            return self
        batches = chosen.skip + chosen.to_come
        return replace(self, batches=batches, per_epoch=max(1, -(-batches // accumulation)))


_logger = logger_of(__name__)

_SHADOWED = {
    "set_initial_training_values": "_initial_values",
    "_init_training_state": "_training_state",
    "_run_epoch": "_run_epoch",
    "get_batch_samples": "_batch_samples",
    "get_eval_dataloader": "_eval_loader",
}
"""Methods of the Trainer, and those of ours that replace them."""


@final
@dataclass(frozen=True, slots=True)
class Resumed:
    checkpoint: str
    first: DataProgress
    own: DataProgress | None

    def of(self, ranks: int, loader: Any = None) -> DataProgress:
        """Return this rank's progress, or the first one's if that counts for all."""
        alike = self.first.position.ranks == ranks and not isinstance(loader, DataLoaderDispatcher)
        return self.own if alike and self.own is not None else self.first


@final
class TrainerData:
    """Follows the data of one Trainer, and leads a resumed training to its place.

    Main thread only; nothing is collective.

    Attributes:
        epoch_ended: whether a training that was stopped within an epoch has told its callbacks of the end.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._stock: dict[str, Callable[..., Any]] = {
            name: getattr(trainer, name) for name in _SHADOWED if hasattr(trainer, name)
        }
        self._resumed: Resumed | None = None
        self._entry: tuple[Continuation, Steps] | None = None
        self._position: Position | None = None
        self._loader: Any = None
        self._place: LoaderPosition | None = None
        self._exhausted = False
        self.epoch_ended = True

    def shadows(self) -> dict[str, Callable[..., Any]]:
        if self._stock.keys() != _SHADOWED.keys():
            _logger.warning(
                "this version of transformers runs its epochs in another way: a resumed run finds its place "
                "in the data as the stock Trainer does. transformers 5.23 is known to work"
            )
            return {}
        return {name: getattr(self, ours) for name, ours in _SHADOWED.items()}

    @contextmanager
    def training(self, resumed: Resumed | None) -> Generator[None]:
        self._resumed, self._position = resumed, None
        try:
            yield
        finally:
            self._resumed = self._entry = self._loader = self._place = None

    def begin(self) -> None:
        """Go on with the sum of the losses that were not logged yet."""
        self.epoch_ended = True
        if self._entry is None or self._resumed is None:
            return
        loss, logged = (self._resumed.own or self._resumed.first).loss
        trainer = self._trainer
        trainer._tr_loss += loss.to(trainer._tr_loss.device)
        trainer._total_loss_scalar -= loss.item()  # its mean is over the steps of this training only
        trainer._globalstep_last_logged = logged

    def progress(self) -> DataProgress | None:
        trainer, position = self._trainer, self._position
        loss = (trainer._tr_loss.detach().cpu(), trainer._globalstep_last_logged)
        if position is None:
            if self._entry is None or self._resumed is None:
                return None
            found = self._resumed.of(trainer.args.world_size)
            return replace(found, position=replace(found.position, step=trainer.state.global_step), loss=loss)
        place, alive = self._place, getattr(trainer, "_eval_dataloaders", {})
        if place is None or (not place.ahead and hidden_position(self._loader) is not None):
            return None
        ended = position.batches == 0 or position.complete or self._exhausted
        ended |= bool(getattr(self._loader, "end_of_dataloader", False))
        own = self._loader.state_dict() if place.ahead and not ended and place.keeps_own_state else None
        return DataProgress(
            position=replace(position, step=trainer.state.global_step),
            loader=place.state(ended=ended, own=own),
            of=place.samples,
            evaluated={
                name: position_of(each).state(ended=True)
                for name, each in alive.items()
                if _can_follow(each) and each.persistent_workers
            },
            loss=loss,
        )

    @property
    def epochs(self) -> int | None:
        if self._position is not None:
            return self._position.epoch
        if self._resumed is None:
            return None
        position = self._resumed.first.position
        return position.epoch + int(position.complete)

    def end_epoch(self, *, stopped: bool) -> bool:
        """Note that training has left an epoch; return whether that has ended."""
        position = self._position
        if position is None:
            return not stopped
        if stopped and not (position.complete or (self._exhausted and position.length is None)):
            return False
        self._position = replace(position, epoch=position.epoch + 1, batches=0)
        return True

    def _initial_values(self, args: Any, dataloader: Any, *rest_of_call: Any) -> tuple[Any, ...]:
        """Compute epochs and steps; those to come follow from the samples to come."""
        stock = self._stock["set_initial_training_values"]
        values: tuple[Any, ...] = stock(args, dataloader, *rest_of_call)
        self._loader, self._entry = dataloader, None
        self._place = position_of(dataloader) if _can_follow(dataloader) else None
        if self._place is None and args.process_index == 0:
            _logger.warning(
                "the position in a %s cannot be saved, as it is no torch DataLoader or keeps its iterator: a "
                "run that is resumed within an epoch finds its place as under the stock Trainer, and draws "
                "and drops what was seen",
                type(dataloader).__name__,
            )
        if self._resumed is None or self._place is None or self._trainer.get_sp_size() > 1:
            return values
        epochs, per_epoch, *_, batches, total = values
        steps = Steps(epochs=epochs, per_epoch=per_epoch, batches=batches, total=total)
        position, accumulation = self._resumed.first.position, args.gradient_accumulation_steps
        now = replace(position, **self._dealing)
        notes, chosen = self._put_back(), self._continuation(now)
        self._place.forget()  # until the epoch begins
        first = steps.with_rest(chosen, accumulation)
        if batches_in(dataloader) is not None:
            steps = steps.after(position, chosen, first, accumulation, fixed=args.max_steps > 0)
        if args.ignore_data_skip:
            chosen, notes = Continuation(epoch=chosen.epoch), []
        self._entry = chosen, first
        if args.process_index == 0:
            _tell(position, now, chosen, steps, notes=notes)
        return (steps.epochs, *values[1:6], steps.total)

    @property
    def _dealing(self) -> dict[str, Any]:
        """The part of a position that says how samples are dealt out now."""
        args, place = self._trainer.args, self._place
        assert place is not None
        return {
            "per_batch": place.per_batch * fetches_of(self._loader),
            "accumulation": args.gradient_accumulation_steps,
            "ranks": args.world_size,
            "samples": self._trainer.get_total_train_batch_size(args),
        }

    def _put_back(self) -> list[str]:
        """Let the next epoch begin from where the save found it; return notes."""
        args, resumed, place = self._trainer.args, self._resumed, self._place
        assert resumed is not None
        found = resumed.of(args.world_size, self._loader)
        if place is None or found.loader is None:
            return []
        notes = place.restore(found.loader, same_ranks=found.position.ranks == args.world_size)
        return [] if found.position.batches == 0 else notes

    def _continuation(self, now: Position) -> Continuation:
        resumed, place = self._resumed, self._place
        assert resumed is not None
        assert place is not None
        found, to_come = resumed.of(now.ranks, self._loader), place.to_come
        whole, loops = place.samples, batches_in(self._loader)
        if found.loader is None or found.loader["ended"]:
            done, to_come = whole or found.position.batches * now.per_batch, 0
        else:
            done = place.seen if whole is None else min(place.seen, whole)
        if to_come is not None:
            to_come = -(-to_come // fetches_of(self._loader))
        chosen = Continuation.of(found.position, now, done=done, to_come=to_come)
        if found.position.complete and chosen.skip == found.position.batches:
            return replace(chosen, skip=max(chosen.skip, loops or 0))  # the data set may have grown since
        return chosen

    def _training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epoch, skip = self._stock["_init_training_state"](*args, **kwargs)
        return (epoch, skip) if self._entry is None else (self._entry[0].epoch, self._entry[0].skip)

    def _run_epoch(self, **call: Any) -> Any:
        """Run an epoch, the first one after a resume from where it was left."""
        loader, epoch, trainer = call["train_dataloader"], call["epoch"], self._trainer
        entry, self._entry = self._entry, None
        state, control = trainer.state, trainer.control
        over = control.should_training_stop or (entry is not None and state.global_step >= state.max_steps)
        chosen, steps = (Continuation(epoch=epoch), None) if entry is None else entry
        with ExitStack() as undo:
            if entry is not None and steps is not None and not trainer.args.ignore_data_skip:
                assert self._resumed is not None
                self._put_back()
                trainer._load_rng_state(self._resumed.checkpoint)
                # With the position they are back; a loop of the Trainer's would put them back once more.
                undo.enter_context(replaced(trainer, _load_rng_state=lambda _checkpoint: None))
                rest = [] if chosen.skip > 0 and (over or chosen.to_come == 0) else loader
                undo.enter_context(
                    replaced(transformers.trainer, skip_first_batches=lambda _loader, _batches: rest)
                )
            if steps is not None and batches_in(loader) is not None:
                call |= {"steps_in_epoch": steps.batches, "num_update_steps_per_epoch": steps.per_epoch}
            if over:
                control.should_training_stop = True
                if self.epoch_ended or not chosen.done:
                    if entry is None and self._resumed is not None:
                        trainer._load_rng_state(self._resumed.checkpoint)
                    return None
                call["num_update_steps_per_epoch"] = 0  # its end alone is still to come
            self._exhausted = False
            if self._place is not None:
                self._position = Position(
                    step=state.global_step,
                    epoch=epoch,
                    batches=chosen.skip,
                    length=None if batches_in(loader) is None else call["steps_in_epoch"],
                    **self._dealing,
                )
            return self._stock["_run_epoch"](**call)

    def _batch_samples(self, iterator: Any, count: int, *args: Any, **kwargs: Any) -> Any:
        result = self._stock["get_batch_samples"](iterator, count, *args, **kwargs)
        self._exhausted = len(result[0]) < count
        if self._position is not None:
            self._position = replace(self._position, batches=self._position.batches + len(result[0]))
        return result

    def _eval_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Make a loader for evaluation; its workers may have lived before the resume."""
        loader = self._stock["get_eval_dataloader"](*args, **kwargs)
        if _can_follow(loader):
            position = position_of(loader)
            found = {} if self._resumed is None else self._resumed.of(self._trainer.args.world_size).evaluated
            for name, each in getattr(self._trainer, "_eval_dataloaders", {}).items():
                if base_of(each) is base_of(loader) and name in found and position.is_new:
                    position.restore(found[name])
        return loader


def _tell(
    before: Position, now: Position, chosen: Continuation, steps: Steps, *, notes: Sequence[str]
) -> None:
    """Tell what a change of ranks, batches or accumulation comes to, and of the data."""
    if now != before:
        _logger.warning(
            "step %d was saved by %s, and is resumed by %s: it goes on in epoch %d%s. Training ends at step "
            "%d; the learning rate is scheduled for that many, and stepped once in each",
            before.step,
            before,
            now,
            chosen.epoch,
            " again" if before.batches and not chosen.done else "",
            steps.total,
        )
    for note in notes:
        _logger.warning("epoch %d: %s", before.epoch, note)


def _can_follow(loader: Any) -> bool:
    """Return whether it is a loader as torch has them, prepared or not."""
    return isinstance(loader, DataLoader) and not keeps_iterator(loader)
