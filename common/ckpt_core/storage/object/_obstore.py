"""GCS and Azure through obstore: objects go from and to where they lie in memory.

obstore transfers contents. Names are listed and deleted by the services' own interfaces, because obstore
lists nothing where one key cannot be a path.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, final

from ckpt_core.errors import ConfigError
from ckpt_core.storage._base import StorageEntry
from ckpt_core.storage._keys import file_key
from ckpt_core.storage.object._azure import AzureContainer
from ckpt_core.storage.object._gcs import GcsBucket
from ckpt_core.storage.object._parts import CONNECTIONS, PartedObject, PartStorage
from ckpt_core.storage.object._storage import RequestTerms
from ckpt_core.storage.object._translation import translated_errors, unanswered

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore

_TRIES: Final = 6
_UNFINISHED: Final = ".ckpt-uploads"
"""Where the parts of unfinished objects lie on GCS, in the root; listings leave it out."""


class Container(Protocol):
    """A bucket or container: what obstore does not do, or not as it must be done."""

    store: AzureStore | GCSStore
    token_name: str
    """The name of an upload's token in the metadata of its object."""

    def listed(self, prefix: str, delimiter: str) -> Iterator[StorageEntry]:
        """List objects by their prefix, up to the next delimiter; names are whole."""
        ...

    def remove(self, path: str) -> None:
        """Delete an object; FileNotFoundError if there is none."""

    def begin(self, path: str, token: str, scratch: str) -> PartedObject:
        """Begin or continue an upload; parts that are objects lie below `scratch`."""
        ...


@final
class ObstoreStorage(PartStorage):
    """A bucket of GCS or a container of Azure, in the words of gcsfs and adlfs."""

    def __init__(self, url: str, storage_options: Mapping[str, Any], terms: RequestTerms) -> None:
        seconds = terms.request_seconds
        super().__init__(url, storage_options, block_bytes=terms.block_bytes, connections=CONNECTIONS)
        if not terms.conditional_writes:
            raise ConfigError(
                f"{self.url}: leave out storage_options conditional_writes=False, which is for stores like S3"
            )
        kind = GcsBucket if url.partition("://")[0] in {"gs", "gcs"} else AzureContainer
        self._try_seconds = seconds / 2
        with translated_errors(self.url, self.redaction):
            self._place: Container = kind(url, self.bucket, storage_options, seconds, **_limits(seconds))

    def size_and_token(self, path: str) -> tuple[int, str | None]:
        import obstore

        with self._asking(path):
            found = obstore.get(self._place.store, path, options={"head": True})
            token = found.attributes.get(self._place.token_name)
            return found.meta["size"], None if token is None else str(token)

    def children(self, path: str) -> Sequence[StorageEntry]:
        found = super().children(path)
        return [each for each in found if each.name != _UNFINISHED] if path == self.path("") else found

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError), self._asking(path):
            self._place.remove(path)

    def replace(self, key: str, content: bytes) -> None:
        import obstore

        path = self.path(file_key(key))
        with self._asking(path):
            obstore.put(self._place.store, path, content, use_multipart=False)

    def put_new(self, path: str, content: Sequence[memoryview], token: str) -> None:
        """Create an object in one request.

        Blocks that an upload to Azure has left are taken for an object there; they stop no other blocks.
        """
        import obstore

        settings: dict[str, Any] = {"mode": "create", "use_multipart": False}
        try:
            with self._asking(path):
                marked = {self._place.token_name: token}
                obstore.put(self._place.store, path, list(content), attributes=marked, **settings)
        except FileExistsError:
            with suppress(FileNotFoundError):
                self.size_of(path)
                raise
            parts = self.begin(path, token, again=False)
            names = [parts.name_of(0, "")]
            with self._asking(path):
                parts.send(names[0], content)
                parts.complete(names)
                parts.abandon()

    def read_start(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        import obstore

        try:
            with self._asking(path):
                found = obstore.get(self._place.store, path, options={"range": (0, most_bytes)})
                return found.meta["size"], bytes(found.bytes())
        except FileNotFoundError:
            raise
        except OSError:
            if self.size_of(path):
                raise
            return 0, b""  # an empty object has no first byte

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        import obstore

        with self._asking(path):
            content = obstore.get_range(self._place.store, path, start=offset, length=len(buffer))
        buffer[: len(content)] = memoryview(content)
        return len(content)

    def begin(self, path: str, token: str, *, again: bool) -> PartedObject:
        del again
        scratch = self.path(f"{_UNFINISHED}/{token}")
        return self._place.begin(path, token, f"{scratch}/{path[len(self.path('')) :].lstrip('/')}")

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> list[str]:
        """Delete parts of objects that were never made; Azure drops its blocks itself."""
        root = f"{self.path(_UNFINISHED)}/"
        abandoned: set[str] = set()
        for entry in self.listed(root, ""):
            key = entry.name[len(root) :].partition("/")[2].rpartition("/")[0]
            if unwanted(key):
                self.remove(entry.name)
                abandoned.add(key)
        return sorted(abandoned)

    def listed(self, prefix: str, delimiter: str) -> Sequence[StorageEntry]:
        try:
            with self._asking(prefix):
                return list(self._place.listed(prefix, delimiter))
        except FileNotFoundError:
            return []  # no such bucket

    @contextmanager
    def _asking(self, path: str) -> Generator[None]:
        began = time.monotonic()
        with translated_errors(self.url, self.redaction):
            try:
                yield
            except FileNotFoundError:
                # That of obstore carries the whole exchange.
                place = f"{self.bucket}/{path}"
                raise FileNotFoundError(errno.ENOENT, "no such object", self.shown(place)) from None
            except Exception as error:
                # That of a time-out has no type of its own; only how long it took tells it.
                waited = time.monotonic() - began
                if type(error).__name__ != "GenericError" or waited < self._try_seconds:
                    raise
                raise unanswered(error, self.url, waited, self.redaction) from None


def _limits(seconds: float) -> dict[str, Any]:
    """Return limits for obstore: a try that begins late still ends in time."""
    half = timedelta(seconds=seconds / 2)
    return {
        "client_options": {"timeout": half, "connect_timeout": min(half, timedelta(seconds=10))},
        "retry_config": {
            "max_retries": _TRIES - 1,
            "retry_timeout": half,
            "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5)},
        },
    }
