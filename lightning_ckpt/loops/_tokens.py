"""The number of tokens that a training was given, for `EveryTokens`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

from ckpt_core.validation import function, imported, integer, require

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
class TokenCount:
    """Counts tokens of batches, of all ranks together.

    Concurrency: the thread that trains; `take` is collective where a function counts, for ranks may differ.

    Args:
        trainer: the Trainer.
        in_batch: tokens in a batch of one rank; None for none.
        all_reduce_max: combines numbers of every rank.
    """

    def __init__(
        self,
        trainer: Any,
        in_batch: int | TokensInBatch | None,
        all_reduce_max: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        self._trainer = trainer
        self._in_batch = in_batch
        self._all_reduce_max = all_reduce_max
        self._pending = 0

    def note(self, batch: Any) -> None:
        """Count a batch of this rank."""
        found = self._in_batch
        if found is not None:
            self._pending += found if isinstance(found, int) else int(found(batch))

    def take(self) -> int:
        """Return the tokens of all ranks since the last call.

        Ranks that share a batch, as under tensor parallelism, count once.
        """
        pending, self._pending = self._pending, 0
        ranks = int(self._trainer.world_size)
        sampler: dict[str, Any] = getattr(self._trainer.strategy, "distributed_sampler_kwargs", None) or {}
        replicas = int(sampler.get("num_replicas", ranks))
        if ranks == 1 or self._in_batch is None or isinstance(self._in_batch, int):
            return pending * replicas
        own = [0] * ranks
        own[self._trainer.global_rank] = pending
        return sum(self._all_reduce_max(own)) * replicas // ranks
