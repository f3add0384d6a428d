"""What a load needs of the stored chunks: DCP's read items as ranges of bytes with a place to go to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from ckpt_core.dcp._landing import Landing
from ckpt_core.reading import Payload, Wanted

_WINDOW_BYTES: Final = 8 << 20  # of what does not go straight to its place


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """A part of one stored chunk, and where it goes; `name` is the live tensor's, unique in a load."""

    name: str
    payload: Payload
    landing: Landing

    def wanted(self, start: int = 0, stop: int | None = None) -> Iterator[Wanted]:
        """What to read, as far as it lies between two bytes of the payload."""
        first, last = self.landing.byte_range
        begin = max(first, start)
        end = last if stop is None else min(last, stop)
        if begin >= end:
            return
        memory = self.landing.memory
        if memory is not None:
            into = memory[begin - first : end - first]
            yield Wanted(payload=self.payload, start=begin, stop=end, into=into)
            return
        while begin < end:
            cut = min(end, (begin // _WINDOW_BYTES + 1) * _WINDOW_BYTES)
            yield Wanted(payload=self.payload, start=begin, stop=cut, take=partial(self.landing.land, begin))
            begin = cut

    def land(self, start: int, content: memoryview) -> None:
        """Copy what the payload holds from byte `start` on into place, as far as it belongs there."""
        memory = self.landing.memory
        if memory is None:
            self.landing.land(start, content)
            return
        first, last = self.landing.byte_range
        begin, end = max(first, start), min(last, start + len(content))
        if begin < end:
            memory[begin - first : end - first] = content[begin - start : end - start]
