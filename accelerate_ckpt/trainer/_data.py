"""The data of a Trainer's training: where it is, and where a resumed one goes on.

The stock Trainer divides the number of steps by those of an epoch as it would be now: wrong for a stream
without a length, and for any other number of ranks, size of batches or accumulation. It draws the order of
the resumed epoch from wherever the generators are. So that a resumed run sees the data it would have seen:

    at the start of every epoch      remember the generators that its order is drawn from
    every fetch                      count batches
    save                             epoch, batches and samples trained on, that start
    a resume, before the first step  epochs and steps to come, from samples
    the first epoch                  begins from the remembered start, behind those samples
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate_ckpt.data._layout import (
    Cut,
    LoaderLayout,
    base_of,
    is_persistent,
    lend_generator,
    length,
    order_of,
    place_rest,
    put_seeds_back,
    rewind,
    set_generator,
    start_here,
)
from accelerate_ckpt.data._tracked import change_of_order, goes_on
from ckpt_core.data import Draws, batches_in, draw_seed, keeps_iterator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, FileFailure
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
        batches: those of that epoch trained on, as its loader counts them.
        cuts: what its loader left out of each order, because ranks or batches changed within the epoch.
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
    """Samples in an optimizer step."""

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
        loss: the sum that is not logged yet, and the step up to which it is.
    """

    position: Position
    start: Mapping[str, Any]
    evaluated: Sequence[str]
    loss: tuple[torch.Tensor, int]
    order: Mapping[str, Any]

    @classmethod
    def read(cls, content: bytes, path: str) -> Self:
        """Return what is in a file."""
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
        done = position.layout.samples(position.done(None))
        done = of if of is not None and position.complete else done
        return DataPosition(epoch=position.epoch, samples=done if of is None else min(done, of), of=of)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """How a resumed training goes on in its data.

    Attributes:
        skip: batches of that epoch that the Trainer skips: whole accumulation windows, or all.
        again: whether the epoch begins again, because its rest is unknown for other ranks or batches.
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

    `whole` is how much there is in the order of an epoch, and `batches` are those of an epoch now: the data
    set may have grown since one that is complete.
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


def note(before: Position, now: Position, chosen: Continuation, steps: Steps, *, rest: str) -> str:
    """Return what a change of ranks, batches or accumulation comes to."""
    data = rest if chosen.done else f"begins epoch {chosen.epoch}"
    if chosen.again:
        data = (
            f"begins epoch {chosen.epoch} again, as its rest is unknown for this number of ranks and "
            "workers, or for these batches"
        )
    return (
        f"step {before.step} was saved by {before}, and is resumed by {now}: it {data}. Training ends at "
        f"step {steps.total}; the learning rate is scheduled for that many, and stepped once in each"
    )


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
    """The progress that a training is resumed from."""

    checkpoint: str
    first: DataProgress
    own: DataProgress | None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """The first epoch of a resumed training."""

    chosen: Continuation
    steps: Steps
    progress: DataProgress
    undo: ExitStack = field(repr=False)


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
        self._entry: _Entry | None = None
        self._progress: DataProgress | None = None
        self._drawn = 0
        self._loader: Any = None
        self._exhausted = False
        self._again: str | None = None
        self._draws = Draws()
        self.epoch_ended = True

    def shadows(self) -> dict[str, Callable[..., Any]]:
        """Return the methods that replace the Trainer's own, by name."""
        if self._stock.keys() != _SHADOWED.keys():
            _logger.warning(
                "this version of transformers runs its epochs in another way: a resumed run finds its place "
                "in the data as the stock Trainer does. transformers 5.23 is known to work"
            )
            return {}
        return {name: getattr(self, ours) for name, ours in _SHADOWED.items()}

    @contextmanager
    def training(self, resumed: Resumed | None) -> Generator[None]:
        """Follow one training, from a checkpoint or from the start."""
        self._resumed, self._progress, self._drawn = resumed, None, 0
        try:
            yield
        finally:
            self._resumed = self._entry = self._loader = None

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
        """Return this rank's progress, for a save; None if no epoch has begun."""
        found, trainer = self._present(), self._trainer
        if found is None and self._entry is not None:
            found = self._entry.progress
        if found is None:
            return None
        position = replace(found.position, step=trainer.state.global_step)
        if position.batches == 0:  # between epochs
            found = replace(found, start=_start_of(self._loader, position.epoch))
        elif not position.complete:
            self._draws.tell(self._loader, ahead=self._draws.before is not None)
        alive = getattr(trainer, "_eval_dataloaders", {}) if trainer.args.dataloader_num_workers else {}
        loss = (trainer._tr_loss.detach().cpu(), trainer._globalstep_last_logged)
        return replace(found, position=position, evaluated=sorted(alive), loss=loss)

    @property
    def epochs(self) -> int | None:
        """Epochs finished; None where the loader is not followed."""
        if self._progress is not None:
            return self._progress.position.epoch
        if self._resumed is None:
            return None
        position = self._resumed.first.position
        return position.epoch + int(position.complete)

    def end_epoch(self, *, stopped: bool) -> bool:
        """Note that training has left an epoch; return whether that has ended."""
        found = self._present()
        if found is None:
            return not stopped
        position = found.position
        if stopped and not (position.complete or (self._exhausted and position.length is None)):
            return False
        after = replace(position, epoch=position.epoch + 1, batches=0, cuts=())
        self._progress, self._drawn = replace(found, position=after), 0
        return True

    def _present(self) -> DataProgress | None:
        """Return the progress after the batches drawn until now."""
        if self._progress is None or not self._drawn:
            return self._progress
        position = self._progress.position
        return replace(self._progress, position=replace(position, batches=position.batches + self._drawn))

    def _initial_values(self, args: Any, dataloader: Any, *rest_of_call: Any) -> tuple[Any, ...]:
        """Compute epochs and steps; those to come follow from the samples to come."""
        stock = self._stock["set_initial_training_values"]
        values: tuple[Any, ...] = stock(args, dataloader, *rest_of_call)
        self._loader = dataloader
        _tell_of_loader(dataloader, args)
        if self._entry is not None:  # a second try, as of `auto_find_batch_size`
            self._entry.undo.close()
        self._entry = None
        if self._resumed is None or not _can_follow(dataloader) or self._trainer.get_sp_size() > 1:
            return values
        position, own = self._resumed.first.position, self._resumed.own
        layout, accumulation = LoaderLayout.of(dataloader), args.gradient_accumulation_steps
        whole, batches, steps = length(dataloader), batches_in(dataloader), _steps_in(values)
        found = continuation(position, layout, accumulation, whole=whole, batches=batches or 0)
        chosen = Continuation(epoch=found.epoch) if args.ignore_data_skip else found
        # Ranks that share one order in another way must draw it from the same state.
        alike = position.ranks == args.world_size and position.layout == layout
        progress = own if own is not None and alike else self._resumed.first
        undo = ExitStack()
        if chosen.cuts:
            again = partial(_draw_again, dataloader, progress.start)
            undo.callback(place_rest(dataloader, chosen.cuts, rewinds=[again]))
        first = _steps_in(stock(args, dataloader, *rest_of_call))
        self._entry = _Entry(chosen=chosen, steps=first, progress=progress, undo=undo)
        if batches is not None:
            steps = steps.after(position, found, first, accumulation, fixed=args.max_steps > 0)
        if args.process_index == 0:
            now = replace(position, **self._dealing(dataloader))
            if now != position:
                rest = goes_on(dataloader, chosen.epoch, chosen.done, whole)
                _logger.warning("%s", note(position, now, chosen, steps, rest=rest))
            _tell_of_rest(progress, chosen, dataloader)
        return (steps.epochs, *values[1:6], steps.total)

    def _dealing(self, loader: Any) -> dict[str, Any]:
        """Return the part of a position that says how samples are dealt out now."""
        args = self._trainer.args
        return {
            "layout": LoaderLayout.of(loader),
            "accumulation": args.gradient_accumulation_steps,
            "ranks": args.world_size,
            "samples": self._trainer.get_total_train_batch_size(args),
        }

    def _training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the first epoch, and the batches to skip in it."""
        epoch, skip = self._stock["_init_training_state"](*args, **kwargs)
        return (epoch, skip) if self._entry is None else (self._entry.chosen.epoch, self._entry.chosen.skip)

    def _run_epoch(self, **call: Any) -> Any:
        """Run an epoch, the first one after a resume from where it was left."""
        loader, epoch = call["train_dataloader"], call["epoch"]
        entry, self._entry = self._entry, None
        state, control = self._trainer.state, self._trainer.control
        over = control.should_training_stop or (entry is not None and state.global_step >= state.max_steps)
        if self._resumed is not None and epoch > 0:
            _draw_no_seed(loader)
        with ExitStack() as undo:
            if entry is not None:
                undo.push(entry.undo)
                self._enter(entry, loader, undo, over=over)
                if batches_in(loader) is not None:
                    call |= {
                        "steps_in_epoch": entry.steps.batches,
                        "num_update_steps_per_epoch": entry.steps.per_epoch,
                    }
            if over:
                control.should_training_stop = True
                if self.epoch_ended or entry is None or not entry.chosen.done:
                    if self._resumed is not None:
                        self._trainer._load_rng_state(self._resumed.checkpoint)
                    return None
                call["num_update_steps_per_epoch"] = 0  # its end alone is still to come
            undo.enter_context(self._draws.seen_of(base_of(loader)))
            self._progress, self._drawn = self._begin(call, entry) if _can_follow(loader) else None, 0
            return self._stock["_run_epoch"](**call)

    def _begin(self, call: dict[str, Any], entry: _Entry | None) -> DataProgress:
        """Return the progress at the start of an epoch, or of the rest of one."""
        loader, args = call["train_dataloader"], self._trainer.args
        checkpoint = call["resume_from_checkpoint"]
        resumed = checkpoint is not None and call["epoch"] == call["epochs_trained"]
        skipped = call["steps_trained_in_current_epoch"] if resumed and not args.ignore_data_skip else 0
        if resumed and not skipped:
            self._trainer._load_rng_state(checkpoint)  # as the Trainer is about to
        self._exhausted = False
        position = Position(
            step=self._trainer.state.global_step,
            epoch=call["epoch"],
            batches=skipped,
            length=None if batches_in(loader) is None else call["steps_in_epoch"],
            cuts=() if entry is None else entry.chosen.cuts,
            **self._dealing(loader),
        )
        if entry is not None and entry.chosen.done:
            return replace(entry.progress, position=position)
        return DataProgress(
            position=position,
            start=_start_of(loader, call["epoch"]),
            evaluated=(),
            loss=(torch.zeros(()), 0),
            order=order_of(loader),
        )

    def _enter(self, entry: _Entry, loader: Any, undo: ExitStack, *, over: bool) -> None:
        """Put everything that the order of the first epoch follows from back."""
        trainer, saved, chosen = self._trainer, entry.progress, entry.chosen
        assert self._resumed is not None
        if trainer.args.ignore_data_skip:
            return
        checkpoint = self._resumed.checkpoint
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(chosen.epoch)
        now = put_seeds_back(loader, saved.start)
        if not chosen.done:
            now()
            set_generator(loader, saved.start)
            return
        undo.callback(now)
        if over or chosen.skip >= entry.steps.batches:
            trainer._load_rng_state(checkpoint)  # there may be no batch after which the Trainer would
            return
        rewind(loader, saved.start)
        layout = LoaderLayout.of(loader)
        if layout.fetches > 1 and not isinstance(loader.dataset, IterableDataset):
            # Of a dispatching loader the Trainer skips fetches, not batches.
            taken = (chosen.skip * layout.per_fetch, chosen.skip * layout.per_step)
            undo.callback(place_rest(loader, [taken]))
        self._again = None if chosen.skip else checkpoint

    def _batch_samples(self, iterator: Any, count: int, *args: Any, **kwargs: Any) -> Any:
        """Fetch the batches of one optimizer step, and count them."""
        checkpoint, self._again = self._again, None
        found = self._progress
        if checkpoint is not None and found is not None:
            # Where nothing is skipped, the Trainer loads the later ones first.
            rewind(self._loader, found.start)
        # With the first batch the order is drawn.
        with self._draws.fetching() if self._drawn else nullcontext():
            result = self._stock["get_batch_samples"](iterator, count, *args, **kwargs)
        if checkpoint is not None:
            self._trainer._load_rng_state(checkpoint)
        self._exhausted = len(result[0]) < count
        self._drawn += len(result[0])
        return result

    def _eval_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Make a loader for evaluation; its workers may have lived before the resume."""
        loader = self._stock["get_eval_dataloader"](*args, **kwargs)
        if self._resumed is not None:
            alive = getattr(self._trainer, "_eval_dataloaders", {})
            for name in set(self._resumed.first.evaluated) & alive.keys():
                _draw_no_seed(alive[name])
        return loader


def _tell_of_loader(loader: Any, args: Any) -> None:
    if not _can_follow(loader) and args.process_index == 0:
        _logger.warning(
            "the position in a %s cannot be saved, as it is no torch DataLoader or keeps its iterator: a run "
            "that is resumed within an epoch finds its place as under the stock Trainer, and draws and drops "
            "what was seen",
            type(loader).__name__,
        )


def _can_follow(loader: Any) -> bool:
    """Return whether it is a loader as torch has them, prepared or not."""
    return isinstance(loader, DataLoader) and not keeps_iterator(loader)


def _tell_of_rest(saved: DataProgress, chosen: Continuation, loader: Any) -> None:
    """Tell what the rest of an epoch comes to, whatever its ranks and batches are."""
    order = order_of(loader)
    if chosen.done and saved.order != order and not saved.position.complete:
        _logger.warning(
            "epoch %d of step %d: %s",
            saved.position.epoch,
            saved.position.step,
            change_of_order(saved.order, order, chosen.done),
        )
    if chosen.skip and isinstance(loader.dataset, IterableDataset):
        _logger.warning(
            "the dataset is iterable: its first %d samples of epoch %d are read again and dropped",
            chosen.done,
            chosen.epoch,
        )
    if chosen.skip and getattr(loader, "submesh_tp", None) is not None:
        _logger.warning(
            "the copy of a loader by which Accelerate skips batches forgets the tensor parallel group: "
            "its ranks see different samples for the rest of epoch %d. Set dispatch_batches=False in "
            "accelerator_config, and each of them reads the dataset itself",
            chosen.epoch,
        )


def _steps_in(values: tuple[Any, ...]) -> Steps:
    epochs, per_epoch, *_, batches, total = values
    return Steps(epochs=epochs, per_epoch=per_epoch, batches=batches, total=total)


def _start_of(loader: Any, epoch: int) -> dict[str, Any]:
    """Return what the order of an epoch that begins now is drawn from."""
    return start_here(loader, made=is_persistent(loader) and epoch > 0)


def _draw_again(loader: Any, start: Mapping[str, Any]) -> None:
    """Go back to where an order was drawn, behind the seed of its iterator."""
    rewind(loader, start)
    if base_of(loader).generator is None:
        draw_seed(None)


def _draw_no_seed(loader: Any) -> None:
    """Let making an iterator draw nothing from the global generator.

    For workers that persist, which the run that was saved had made before.
    """
    base = base_of(loader)
    if is_persistent(base) and base.generator is None:
        lend_generator(base)  # for good: they draw no other seed
