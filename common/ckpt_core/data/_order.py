"""The order of an epoch's samples over all ranks, dealt out among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """An epoch's samples in the order in which all ranks together see them.

    Ranks take samples in turn: rank r of W takes r, r + W, r + 2 W, …, as `DistributedSampler` deals them.
    After n batches of B on each of W ranks, the first n * B * W have been seen: exactly this number is the
    position, whatever W and B become.

        order = EpochOrder(samples=permutation, seen=n * B * W)
        order.share(rank, world_size)   # what this rank sees in the rest of the epoch

    Attributes:
        samples: indices of the whole epoch, each once, without padding.
        seen: how many of them are done.
        drop_last: whether the last samples are dropped, instead of the first repeated, if ranks would get
            unequal numbers of them.
    """

    samples: Sequence[Any]
    seen: int
    drop_last: bool = False

    @property
    def rest(self) -> Sequence[Any]:
        """The samples of the epoch that no rank has seen."""
        return self.samples[self.seen :]

    def padding(self, shards: int) -> int:
        """Return how many samples are repeated, or if negative dropped, at the end."""
        over = len(self.rest) % shards
        if not over:
            return 0
        return -over if self.drop_last else shards - over

    def share(self, shard: int, shards: int) -> list[Any]:
        """Return what one of `shards` equal shards sees in the rest of the epoch."""
        rest, padding = list(self.rest), self.padding(shards)
        if padding < 0:
            del rest[padding:]
        while padding > 0:
            rest += self.samples[:padding]
            padding -= len(self.samples)
        return rest[shard::shards]
