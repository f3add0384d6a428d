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

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from accelerate_ckpt.data._saved import change_of_order
from accelerate_ckpt.data._starts import lend_generator
from accelerate_ckpt.trainer._continuation import (
    Continuation,
    DataProgress,
    Position,
    Steps,
    continuation,
    note,
)
from accelerate_ckpt.trainer._cuts import (
    Intake,
    OrderWithCut,
    can_leave_out,
    generators_of,
    leave_out,
    order_made_by,
    sampler_of,
)
from ckpt_core.data import Draws, batches_in, draw_seed, keeps_iterator
from ckpt_core.disclosure import logger_of
from ckpt_core.state import load_rng_state, rng_state

_logger = logger_of(__name__)

SHADOWED = (
    "set_initial_training_values",
    "_init_training_state",
    "_run_epoch",
    "get_batch_samples",
    "get_eval_dataloader",
)
_OF_SAMPLERS = ("initial_seed", "batch_size")
"""What the orders of Accelerate's and the Trainer's own samplers follow from, besides generators."""


@final
@dataclass(frozen=True, slots=True)
class Resumed:
    """The progress that a training is resumed from.

    Attributes:
        checkpoint: the directory that the Trainer resumes from.
        first: the first rank's.
        own: this rank's; None if it was not among those that saved.
    """

    checkpoint: str
    first: DataProgress
    own: DataProgress | None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """The first epoch of a resumed training.

    Attributes:
        chosen: how it goes on.
        steps: of that epoch alone.
        progress: what its order is drawn from.
        undo: puts the loader back to whole epochs.
    """

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
            name: getattr(trainer, name) for name in SHADOWED if hasattr(trainer, name)
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
        if self._stock.keys() != set(SHADOWED):
            _logger.warning(
                "this version of transformers runs its epochs in another way: a resumed run finds its place "
                "in the data as the stock Trainer does. transformers 5.23 is known to work"
            )
            return {}
        made: tuple[Callable[..., Any], ...] = (
            self._initial_values,
            self._training_state,
            self._run_epoch,
            self._batch_samples,
            self._eval_loader,
        )
        return dict(zip(SHADOWED, made, strict=True))

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
        if self._entry is not None:
            self._resume_loss()

    def progress(self) -> DataProgress | None:
        """Return this rank's progress, for a save; None if no epoch has begun."""
        found, trainer = self._present(), self._trainer
        if found is None and self._entry is not None:
            found = self._entry.progress
        if found is None:
            return None
        position = replace(found.position, step=trainer.state.global_step)
        if position.batches == 0:  # between epochs
            found = replace(found, start=rng_state(), **_order_of(self._loader, "initial_seed"))
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

    def _initial_values(self, args: Any, dataloader: Any, *rest: Any) -> tuple[Any, ...]:
        """Compute epochs and steps; those to come follow from the samples to come."""
        stock = self._stock["set_initial_training_values"]
        values: tuple[Any, ...] = stock(args, dataloader, *rest)
        self._loader = dataloader
        _tell_of_loader(dataloader, args)
        if self._entry is not None:  # a second try, as of `auto_find_batch_size`
            self._entry.undo.close()
        self._entry = None
        if self._resumed is None or not _can_follow(dataloader) or self._trainer.get_sp_size() > 1:
            return values
        position, own = self._resumed.first.position, self._resumed.own
        order = order_made_by(dataloader)
        chosen = found = _continuation(position, dataloader, args, batches=_steps_in(values).batches)
        if args.ignore_data_skip:
            chosen = Continuation(epoch=found.epoch)
        undo = ExitStack()
        if chosen.cuts:
            undo.callback(leave_out(dataloader, chosen.cuts))
        first = _steps_in(stock(args, dataloader, *rest))
        # Ranks that share one order in another way must draw it from the same state.
        alike = position.ranks == args.world_size and position.intake == Intake.of(dataloader)
        progress = own if own is not None and alike else self._resumed.first
        self._entry = _Entry(chosen=chosen, steps=first, progress=progress, undo=undo)
        accumulation, fixed = args.gradient_accumulation_steps, args.max_steps > 0
        steps = _steps_in(values)
        if batches_in(dataloader) is not None:
            steps = steps.after(position, found, first, accumulation, fixed=fixed)
        self._say(position, chosen, steps, dataloader)
        if args.process_index == 0 and chosen.done:
            _tell_of_order(progress, order, chosen.done)
        return (steps.epochs, *values[1:6], steps.total)

    def _say(self, position: Position, chosen: Continuation, steps: Steps, loader: Any) -> None:
        """Log what a change of ranks, batches or accumulation comes to."""
        args, sampler = self._trainer.args, sampler_of(loader)
        now = replace(
            position,
            intake=Intake.of(loader),
            accumulation=args.gradient_accumulation_steps,
            ranks=args.world_size,
        )
        if args.process_index == 0 and now != position:
            whole = sampler.whole if isinstance(sampler, OrderWithCut) else sampler
            size = None if whole is None else len(whole)
            _logger.warning(
                "%s", note(position, now, chosen, steps, samples=size, dropping=args.dataloader_drop_last)
            )
        if args.process_index == 0 and chosen.skip and now.intake.iterable:
            _logger.warning(
                "the dataset is iterable: its first %d samples of epoch %d are read again and dropped",
                chosen.done,
                chosen.epoch,
            )
        if args.process_index == 0 and chosen.skip and getattr(loader, "submesh_tp", None) is not None:
            _logger.warning(
                "the copy of a loader by which Accelerate skips batches forgets the tensor parallel group: "
                "its ranks see different samples for the rest of epoch %d. Set dispatch_batches=False in "
                "accelerator_config, and each of them reads the dataset itself",
                chosen.epoch,
            )

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
            undo.enter_context(self._draws.seen_of(getattr(loader, "base_dataloader", loader)))
            self._progress, self._drawn = self._begin(call, entry) if _can_follow(loader) else None, 0
            return self._stock["_run_epoch"](**call)

    def _begin(self, call: dict[str, Any], entry: _Entry | None) -> DataProgress:
        """Return the progress at the start of an epoch, or of the rest of one."""
        loader, args, checkpoint = (
            call["train_dataloader"],
            self._trainer.args,
            call["resume_from_checkpoint"],
        )
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
            intake=Intake.of(loader),
            accumulation=args.gradient_accumulation_steps,
            ranks=args.world_size,
        )
        if entry is not None and entry.chosen.done:
            return replace(entry.progress, position=position)
        nothing = (torch.zeros(()), 0)
        return DataProgress(
            position=position,
            start=rng_state(),
            evaluated=(),
            loss=nothing,
            order=order_made_by(loader),
            **_order_of(loader),
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
        sampler = sampler_of(loader)
        _put_back(loader, saved, undo)
        if not chosen.done:
            return
        if over or chosen.skip >= entry.steps.batches:
            trainer._load_rng_state(checkpoint)  # there may be no batch after which the Trainer would
            return
        load_rng_state(saved.start)
        if isinstance(sampler, OrderWithCut):
            _draw_seed(loader)  # making an iterator does, before it draws the order
            sampler.fix()
            load_rng_state(saved.start)
        intake = Intake.of(loader)
        if sampler is not None and intake.fetches > 1:
            # Of a dispatching loader the Trainer skips fetches, not batches.
            taken = (chosen.skip * intake.unit, chosen.skip * intake.batch)
            undo.callback(leave_out(loader, [taken]))
        self._again = None if chosen.skip else checkpoint

    def _resume_loss(self) -> None:
        """Go on with the sum of the losses that were not logged yet."""
        assert self._resumed is not None
        loss, logged = (self._resumed.own or self._resumed.first).loss
        trainer = self._trainer
        trainer._tr_loss += loss.to(trainer._tr_loss.device)
        trainer._total_loss_scalar -= loss.item()  # its mean is over the steps of this training only
        trainer._globalstep_last_logged = logged

    def _batch_samples(self, iterator: Any, count: int, *args: Any, **kwargs: Any) -> Any:
        """Fetch the batches of one optimizer step, and count them."""
        checkpoint, self._again = self._again, None
        found = self._progress
        if checkpoint is not None and found is not None:
            load_rng_state(found.start)  # where nothing is skipped, the Trainer loads the later ones first
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


def _continuation(position: Position, loader: Any, args: Any, *, batches: int) -> Continuation:
    sampler = sampler_of(loader)
    samples = len(sampler) if sampler is not None else None
    found = continuation(
        position,
        Intake.of(loader),
        args.gradient_accumulation_steps,
        samples=samples,
        divisible=can_leave_out(loader),
    )
    if position.complete and not found.cuts and found.skip == position.batches < batches:
        return replace(found, skip=batches)  # the data set has grown since that epoch
    return found


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


def _tell_of_order(saved: DataProgress, order: Mapping[str, Any], done: int) -> None:
    if saved.order not in ({}, order) and not saved.position.complete:
        _logger.warning(
            "epoch %d of step %d: %s",
            saved.position.epoch,
            saved.position.step,
            change_of_order(saved.order, order, done),
        )


def _steps_in(values: tuple[Any, ...]) -> Steps:
    epochs, per_epoch, *_, batches, total = values
    return Steps(epochs=epochs, per_epoch=per_epoch, batches=batches, total=total)


def _order_of(loader: Any, *names: str) -> dict[str, Any]:
    """Return what the order of an epoch follows from, but the global generators."""
    found = {name: getattr(sampler_of(loader), name, None) for name in names or _OF_SAMPLERS}
    return {
        "generators": [None if each is None else each.get_state() for each in generators_of(loader)],
        "sampler": {name: value for name, value in found.items() if type(value) is int},
    }


def _put_back(loader: Any, saved: DataProgress, undo: ExitStack) -> None:
    """Give a loader what its order follows from: seeds for good, others for an epoch."""
    sampler = sampler_of(loader)
    if isinstance(sampler, OrderWithCut):
        sampler = sampler.whole
    for name, value in saved.sampler.items():
        if type(now := getattr(sampler, name, None)) is int:
            if name != "initial_seed":
                undo.callback(setattr, sampler, name, now)
            setattr(sampler, name, value)
    for generator, state in zip(generators_of(loader), saved.generators, strict=True):
        if generator is not None and state is not None:
            generator.set_state(state)


def _draw_seed(loader: Any) -> None:
    """Draw from the global generator what making an iterator draws."""
    if getattr(loader, "base_dataloader", loader).generator is None:
        draw_seed(None)


def _draw_no_seed(loader: Any) -> None:
    """Let making an iterator draw nothing from the global generator.

    For workers that persist, which the run that was saved had made before.
    """
    base = getattr(loader, "base_dataloader", loader)
    if base.persistent_workers and base.num_workers > 0 and base.generator is None:
        lend_generator(base)  # for good: they draw no other seed
