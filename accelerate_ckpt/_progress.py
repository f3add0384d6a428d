"""Progress of a training: optimizer steps, and positions of the data loaders.

Stock Accelerate forgets the epoch a loader is in and what its shuffling started from; and a resumed loop
makes an iterator, which draws from the global generator after `load_state` has put it back. So that a resumed
run sees the same data and the same random numbers:

    at the start of every epoch     remember what the shuffling starts from
    save                            epoch, whether within it, that start, a stateful loader's own state
    load                            epoch, stateful loader's own state
    the first epoch after a load    begins from the remembered start, and the generators are put back
                                    right before the first batch is handed out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator, data_loader
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderStateMixin

from ckpt_core.state import load_rng_state, unwrap_optimizer

# Called once per batch, after it was fetched and before it is handed out.
_SEAM = "_update_state_dict"
_DISPATCHER_SEAM = "slice_fn"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of one accelerator's training. Main thread only."""

    steps: StepCounter
    loaders: Loaders

    @classmethod
    def of(cls, accelerator: Accelerator) -> Self:
        """Track what is prepared already."""
        progress = cls(steps=StepCounter(), loaders=Loaders(accelerator))
        for optimizer in accelerator._optimizers:
            progress.steps.count(optimizer)
        return progress

    def prepared_optimizer(self, optimizer: Any) -> Any:
        """Track an optimizer that `prepare` has just wrapped; return it."""
        self.steps.count(optimizer)
        return optimizer

    def prepared_loader(self, loader: Any) -> Any:
        """Track a loader that `prepare` has just made; return it."""
        self.loaders.track_prepared(loader)
        return loader

    def release(self) -> None:
        """Stop tracking everything, and forget the progress."""
        self.loaders.release()
        self.steps.release()


@final
class StepCounter:
    """Counts steps of the optimizer that has made most of them. Main thread only.

    An optimizer that joins later begins where the others are. A new training with optimizers of its own
    counts from the first step.

    Attributes:
        step: optimizer steps done, those before the last resume included.
    """

    def __init__(self) -> None:
        self.step = 0
        self._steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._handles: list[Any] = []

    def count(self, optimizer: Any) -> None:
        """Count the steps of an optimizer from now on; idempotent."""
        # The wrapper has no step hooks of its own, and its `step` is called for micro-batches too.
        inner = unwrap_optimizer(optimizer)
        if inner in self._steps:
            return
        self._steps[inner] = self.step
        self._handles.append(inner.register_step_post_hook(self._note))

    def restore(self, step: int) -> None:
        """Continue counting from `step`."""
        self.step = step
        for optimizer in self._steps:
            self._steps[optimizer] = step

    def release(self) -> None:
        """Forget every optimizer, and all steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._steps.clear()
        self.step = 0

    def _note(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer in self._steps:
            self._steps[optimizer] += 1
            self.step = max(self.step, self._steps[optimizer])


def steps_made(optimizers: Sequence[Any]) -> int:
    """Return the number of steps in the optimizers' own state; 0 if there is none."""
    steps = (
        state["step"] for optimizer in optimizers for state in optimizer.state.values() if "step" in state
    )
    return max(map(int, steps), default=0)


@final
class Loaders:
    """The data loaders of one accelerator. Main thread only."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._tracked: dict[int, TrackedLoader] = {}
        self._reentry: _Reentry | None = None
        for loader in accelerator._dataloaders:
            self.track(loader)

    def track_prepared(self, loader: Any) -> None:
        """Track a loader that `prepare` has just made.

        Making it, stock Accelerate starts a stateful loader's first iterator, workers included, before the
        loader has its sampler: the first epoch would see another order than the one that is restored.
        """
        self.track(loader)
        tracked = self._tracked.get(id(loader))
        if tracked is not None and getattr(loader, "use_stateful_dataloader", False):
            loader.base_dataloader.load_state_dict({})
            tracked.remakes_iterator = True

    def track(self, loader: Any) -> None:
        """Track a prepared loader from now on; idempotent."""
        if isinstance(loader, DataLoaderStateMixin) and id(loader) not in self._tracked:
            self._tracked[id(loader)] = TrackedLoader(loader, lambda: self._reentry)

    def track_copy(self, original: Any, copy: Any) -> None:
        """Track a copy by `skip_first_batches`, which finishes the same epoch."""
        tracked = self._tracked.get(id(original))
        if tracked is not None and isinstance(copy, DataLoaderStateMixin):
            tracked.watch(copy)

    def positions(self) -> list[dict[str, Any]]:
        """Return a plain value for every loader, in the order of their preparation."""
        return [
            tracked.position() if tracked is not None else {}
            for tracked in map(self._of, self._accelerator._dataloaders)
        ]

    def restore(
        self, positions: Sequence[Mapping[str, Any]], rng: Mapping[str, Any], *, same_ranks: bool
    ) -> None:
        """Put every loader back to its saved position.

        Args:
            positions: what `positions` gave.
            rng: states of the generators, to be put back right before the next batch.
            same_ranks: whether the positions are of this rank, among as many ranks as saved.
        """
        within: TrackedLoader | None = None
        pairs = zip(self._accelerator._dataloaders, positions, strict=False)
        for tracked, position in ((self._of(loader), position) for loader, position in pairs):
            if tracked is None or not position:
                continue
            tracked.restore(position, same_ranks=same_ranks)
            within = tracked if position["within"] else within
        self._reentry = _Reentry(rng, within)

    def release(self) -> None:
        """Stop tracking every loader."""
        for tracked in self._tracked.values():
            tracked.release()
        self._tracked.clear()
        self._reentry = None

    def _of(self, loader: Any) -> TrackedLoader | None:
        return self._tracked.get(id(loader))


@final
class _Reentry:
    """Re-entry after a load: keeps the saved random state until the first batch."""

    def __init__(self, rng: Mapping[str, Any], within: TrackedLoader | None) -> None:
        self._rng = rng
        self._within = within
        self._batches_left: int | None = None

    def begin(self, tracked: TrackedLoader, num_batches: int) -> None:
        """Prepare an epoch of which the user sees batch number `num_batches` first."""
        if self._batches_left == 0:
            return
        if self._within is None:
            # Saved between epochs: making the iterator draws from where the generators stood.
            load_rng_state(self._rng)
            self._batches_left = num_batches
        elif self._within is tracked:
            tracked.rewind()
            self._batches_left = num_batches

    def batch(self, tracked: TrackedLoader) -> None:
        """Note a batch that was fetched, to be handed out or skipped."""
        if not self._batches_left or self._within not in {None, tracked}:
            return
        if self._within is tracked:
            load_rng_state(self._rng)
        self._batches_left -= 1


@final
class TrackedLoader:
    """One prepared loader, and the copies of it that skip batches.

    `remakes_iterator`: its next iterator replaces one that is made already, as in the first epoch of a
    stateful loader. Making it must not draw from the global generator once more.
    """

    def __init__(self, loader: Any, reentry: Callable[[], _Reentry | None]) -> None:
        self._loader = loader
        self._reentry = reentry
        self.remakes_iterator = False
        self._lent_to: Any = None
        self._active = loader
        self._start: Mapping[str, Any] = {}
        self._rewind_to: Mapping[str, Any] = {}
        self._watched: list[tuple[Any, dict[str, Any]]] = []
        self.watch(loader)

    def watch(self, loader: Any) -> None:
        """Wrap the methods that `loader` calls for every epoch and every batch."""
        seam = _DISPATCHER_SEAM if isinstance(loader, DataLoaderDispatcher) else _SEAM
        begin, end, per_batch = loader.begin, loader.end, getattr(loader, seam)
        before = {seam: loader.__dict__[seam]} if seam in loader.__dict__ else {}

        def watched_begin() -> None:
            begin()
            self._begin(loader)

        def watched_end() -> None:
            end()
            # A copy that skips batches finishes the original's epoch.
            self._loader.iteration = loader.iteration

        def watched_batch(*args: Any, **kwargs: Any) -> Any:
            self._batch()
            return per_batch(*args, **kwargs)

        loader.__dict__.update({"begin": watched_begin, "end": watched_end, seam: watched_batch})
        self._watched.append((loader, before))

    def position(self) -> dict[str, Any]:
        """Return epoch, position, start of the shuffling and a stateful loader's state."""
        loader = self._active
        iterating = any(each is loader for each in loader.gradient_state.dataloader_references)
        ended = bool(loader.end_of_dataloader)
        within = iterating and not ended
        return {
            "iteration": loader.iteration + int(iterating and ended),
            "within": within,
            "start": dict(self._start) if within else self._here(),
            "state": self._loader_state(loader),
        }

    def restore(self, position: Mapping[str, Any], *, same_ranks: bool) -> None:
        """Go back to a position, but for values that belong to another rank."""
        self._active = self._loader
        self._loader.iteration = position["iteration"]
        start = position["start"]
        self.remakes_iterator = bool(start.get("anew"))
        self._rewind_to = start if same_ranks else {"generator": start.get("generator")}
        if same_ranks and position["state"] is not None:
            self._loader.load_state_dict(position["state"])
            if not position["within"]:
                # A finished iterator is made first, then the one that will be used: the first one's draw from
                # the global generator belongs to an epoch that is over.
                self._loader.base_dataloader.state_dict()
        if not position["within"]:
            self._rewind()

    def rewind(self) -> None:
        """Start shuffling from where the saved epoch started."""
        if self._rewind_to.get("torch") is not None:
            torch.set_rng_state(self._rewind_to["torch"])
        self._rewind()

    def release(self) -> None:
        """Undo `watch`."""
        self._take_generator_back()
        for loader, before in self._watched:
            for name in ("begin", "end", _SEAM, _DISPATCHER_SEAM):
                if name in {"begin", "end", _SEAM} or before:
                    loader.__dict__.pop(name, None)
            loader.__dict__.update(before)
        self._watched.clear()

    def _begin(self, loader: Any) -> None:
        self._active = loader
        reentry = self._reentry()
        if reentry is not None:
            # A dispatcher cuts the first batch once more, to fill up the last one.
            extra = int(isinstance(loader, DataLoaderDispatcher) and not loader._drop_last)
            reentry.begin(self, getattr(loader, "skip_batches", 0) + 1 + extra)
        self._start = self._here()
        if self.remakes_iterator:
            self._lend_generator(loader.base_dataloader)

    def _lend_generator(self, base: Any) -> None:
        if base.generator is None:
            base.generator = torch.Generator()
            base.generator.set_state(torch.get_rng_state())
            self._lent_to = base

    def _take_generator_back(self) -> None:
        if self._lent_to is not None:
            self._lent_to.generator = None
            self._lent_to = None
        self.remakes_iterator = False

    def _batch(self) -> None:
        self._take_generator_back()
        reentry = self._reentry()
        if reentry is not None:
            reentry.batch(self)

    def _rewind(self) -> None:
        generator, state = self._generator(), self._rewind_to.get("generator")
        if generator is not None and state is not None:
            generator.set_state(state)

    def _here(self) -> dict[str, Any]:
        generator = self._generator()
        return {
            "torch": torch.get_rng_state(),
            "generator": None if generator is None else generator.get_state(),
            "anew": self.remakes_iterator,
        }

    def _generator(self) -> torch.Generator | None:
        """Return the generator that a shuffling sampler owns, if any."""
        synchronized = getattr(self._loader, "synchronized_generator", None)
        found = synchronized or getattr(_sampler_of(self._loader), "generator", None)
        return found if isinstance(found, torch.Generator) else None

    def _loader_state(self, loader: Any) -> Any:
        return loader.state_dict() if getattr(loader, "use_stateful_dataloader", False) else None


_sampler_of: Callable[[Any], Any] = data_loader.get_sampler
