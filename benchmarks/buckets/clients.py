"""What takes part: it saves one state under a prefix of the bucket, and loads it back."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Final, Literal, final

import numpy as np
import torch

from benchmarks.contenders import Entrant
from benchmarks.loading.loader import LoadTask, raw_bytes
from benchmarks.s3 import Server

Way = Literal["save", "load"]
_CONTENT: Final = "joined bytes"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BucketTask:
    """What every client is given: live tensors, and a server."""

    live: LoadTask
    server: Server

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors together."""
        return self.live.size_bytes

    @property
    def content(self) -> memoryview:
        """The bytes of all tensors in one piece of memory, for those who know no tensors."""
        if _CONTENT not in self.live.shared:
            joined = np.concatenate([raw_bytes(tensor).cpu().numpy() for tensor in self._tensors])
            self.live.shared[_CONTENT] = joined
        content: memoryview = self.live.shared[_CONTENT].data
        return content

    def deliver(self, start: int, content: memoryview) -> None:
        """Copy a range of the joined bytes into the live tensors that it belongs to."""
        ends = list(accumulate(tensor.nbytes for tensor in self._tensors))
        index = bisect_right(ends, start)
        while content:
            memory = raw_bytes(self._tensors[index]).numpy().data[start - ends[index] :]
            count = min(len(memory), len(content))
            memory[:count] = content[:count]
            start, content, index = start + count, content[count:], index + 1

    @property
    def _tensors(self) -> Sequence[torch.Tensor]:
        return list(self.live.tensors.values())


class BucketClient(Entrant):
    """Saves durably and loads, over and over, each time under a fresh prefix.

    Attributes:
        ways: what it does at all.
    """

    task: BucketTask
    ways: ClassVar[tuple[Way, ...]] = ("save", "load")

    def prefix(self, number: int) -> str:
        """Where save `number` goes in the bucket; there is nothing before."""
        return f"{self.key}/{number}"

    def url(self, number: int) -> str:
        """The same as a URL."""
        return f"s3://{self.task.server.bucket}/{self.prefix(number)}"

    def prepare(self) -> None:
        """Do what is no part of a save, such as allocating what is kept between saves."""
        return

    @abstractmethod
    def save(self, number: int) -> None:
        """Save; durable on return."""

    @abstractmethod
    def load(self, number: int) -> None:
        """Load what save `number` has saved."""

    def is_content(self, key: str) -> bool:
        """Return whether an object below its key was written by a save, and may be deleted after it."""
        return key.startswith(self.key)

    def poison(self) -> None:
        """Make sure that what the next load leaves out is seen."""
        self.task.live.poison()

    def check(self) -> None:
        """Compare what the last load has brought with what was saved.

        Raises:
            WrongValuesError: it differs.
        """
        self.task.live.check()


class ByteClient(BucketClient):
    """Saves and loads the bytes of all tensors as one object, without any format."""

    def save(self, number: int) -> None:
        """Put."""
        self.put(self.prefix(number), self.task.content)

    def load(self, number: int) -> None:
        """Get."""
        self.get(self.prefix(number))

    @abstractmethod
    def put(self, key: str, content: memoryview) -> None:
        """Make an object of the bytes."""

    @abstractmethod
    def get(self, key: str) -> None:
        """Bring the bytes of an object into the live tensors."""

    def prepare(self) -> None:
        """Join the bytes."""
        _ = self.task.content
