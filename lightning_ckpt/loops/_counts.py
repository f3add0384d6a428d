"""Counts of epochs and tokens, for `EveryEpochs` and `EveryTokens`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

from ckpt_core.cadence import Counts
from ckpt_core.validation import function, imported, integer, plain_integer, require
from lightning_ckpt.loops._running import Running

TokensInBatch: TypeAlias = Callable[[Any], int]
"""Returns the number of tokens in a batch of this rank."""


def tokens_in_batch(given: int | TokensInBatch | str | None) -> int | TokensInBatch | None:
    """Return the option `tokens=`, validated.

    Raises:
        ConfigError: it is neither a number nor a function, or the name of none.
    """
    if given is None or (isinstance(given, int) and integer("tokens", given, minimum=1) is None):
        return given
    number = isinstance(given, int | float)
    require("tokens", integer("tokens", given, minimum=1) if number else function("tokens", given))
    return imported("tokens", given)  # type: ignore[arg-type]


@final
class TrainingCounts:
    """Counts epochs and tokens of a fit, for policies that save by them.

    Concurrency: the thread that trains; where a function counts, `now` and `add_up` are collective, for ranks
    may differ.

    Args:
        running: what a save adds, the tokens of all ranks among it.
        in_batch: tokens in a batch of one rank; None for none.
        all_reduce_max: combines numbers of every rank.
        needed: whether the save policy counts anything.
    """

    def __init__(
        self,
        running: Running,
        in_batch: int | TokensInBatch | None,
        all_reduce_max: Callable[[Sequence[int]], Sequence[int]],
        *,
        needed: bool,
    ) -> None:
        self._running = running
        self._trainer = running.loops.trainer
        self._in_batch = in_batch
        self._all_reduce_max = all_reduce_max
        self._needed = needed
        self._pending = 0

    def note(self, batch: Any) -> None:
        """Count a batch of this rank."""
        found = self._in_batch
        if found is not None:
            self._pending += found if isinstance(found, int) else _checked(found(batch))

    def now(self) -> Counts:
        """Return the counts of all ranks; nothing for a policy that needs none."""
        if not self._needed:
            return {}
        self.add_up()
        progress = self._trainer.fit_loop.epoch_progress.current
        # Of an epoch's last batch it is decided before Lightning counts the epoch.
        epochs = progress.started if self._running.loops.epoch_is_over else progress.processed
        return {"epochs": epochs, "tokens": self._running.tokens}

    def add_up(self) -> None:
        """Add up the tokens of all ranks, for a decision or a save."""
        self._running.tokens += self._of_all_ranks()

    def _of_all_ranks(self) -> int:
        """Return the tokens since the last call; those that ranks share count once."""
        pending, self._pending = self._pending, 0
        ranks = int(self._trainer.world_size)
        sampler: dict[str, Any] = getattr(self._trainer.strategy, "distributed_sampler_kwargs", None) or {}
        replicas = int(sampler.get("num_replicas", ranks))  # fewer under tensor parallelism
        if ranks == 1 or self._in_batch is None or isinstance(self._in_batch, int):
            return pending * replicas
        own = [0] * ranks
        own[self._trainer.global_rank] = pending
        return sum(self._all_reduce_max(own)) * replicas // ranks


def _checked(tokens: Any) -> int:
    """Return what a function counted, as an int.

    Raises:
        ConfigError: it is no count.
    """
    plain = plain_integer(tokens)
    require("the function given as tokens=", integer("the number of a batch", plain, minimum=0))
    return int(plain)
