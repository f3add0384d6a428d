"""What takes part: it saves one state under a prefix of the bucket, and loads it back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, final

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from benchmarks.contenders import Entrant
from benchmarks.loading.loader import LoadTask, WrongValuesError, raw_bytes
from benchmarks.s3 import Server

Way = Literal["save", "load"]
Bytes = npt.NDArray[np.uint8]


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
    def content(self) -> Bytes:
        """The bytes of all tensors in one piece of memory, for those who know no tensors."""
        return self._shared("content", self._joined)

    @property
    def landing(self) -> Bytes:
        """Memory as large, for the same bytes to come back to."""
        return self._shared("landing", lambda: np.zeros_like(self.content))

    def _shared(self, name: str, make: Callable[[], Bytes]) -> Bytes:
        if name not in self.live.shared:
            self.live.shared[name] = make()
        return cast("Bytes", self.live.shared[name])

    def _joined(self) -> Bytes:
        return np.concatenate([raw_bytes(tensor).cpu().numpy() for tensor in self.live.tensors.values()])


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
        self.get(self.prefix(number), self.task.landing)

    @abstractmethod
    def put(self, key: str, content: Bytes) -> None:
        """Make an object of the bytes."""

    @abstractmethod
    def get(self, key: str, landing: Bytes) -> None:
        """Bring the bytes of an object there."""

    def prepare(self) -> None:
        """Join the bytes, and touch the memory to which they come back."""
        _ = self.task.content, self.task.landing

    def poison(self) -> None:
        """Clear the memory to which the bytes come back."""
        self.task.landing.fill(0)

    def check(self) -> None:
        """Compare by CRC-32."""
        found, saved = (crc32(cast("Any", each).data) for each in (self.task.landing, self.task.content))
        if found != saved:
            raise WrongValuesError("the bytes are not those that were put")
