"""GCS and Azure through obstore, with the services' own libraries where obstore has no words.

obstore cannot list a prefix with a key that is no path of its own, such as `a//b`, and cannot make an object
of parts only if there is none.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, Protocol, final

from ckpt_core.disclosure import Redaction, public_url
from ckpt_core.errors import ConfigError
from ckpt_core.storage.object._azure import AzureContainer
from ckpt_core.storage.object._client import Found
from ckpt_core.storage.object._gcs import GcsBucket
from ckpt_core.storage.object._parts import BLOCK_BYTES, CONNECTIONS, PartClient, Parts
from ckpt_core.storage.object._s3_options import attempts_within
from ckpt_core.storage.object._translation import translated_errors

UNFINISHED: Final = ".ckpt-uploads"
"""Directory of the root for parts of objects that are not complete, where a service hides no parts."""


class Bucket(Protocol):
    """What a service needs besides obstore.

    Attributes:
        store: obstore's.
        metadata: name of an upload's token in the metadata of its object.
    """

    metadata: str

    @property
    def store(self) -> Any: ...

    def entries(self, prefix: str, *, deep: bool) -> Iterator[Found]:
        """List what begins with a prefix, up to the next slash or `deep`; names are whole keys."""
        ...

    def parts(self, path: str, token: str, unfinished: str) -> Parts:
        """Begin an object that arrives in parts, or continue one of the same token."""
        ...


@final
class ObstoreClient(PartClient):
    """A bucket of GCS, or a container of Azure.

    Args:
        url: of the root.
        storage_options: in the words of gcsfs or adlfs.
        request_seconds: the time limit of one request, retries included.
        conditional_writes: must be true; both services know them.
        block_bytes: size of the parts of an upload; None for the default.

    Raises:
        ConfigError: an option cannot be translated.
    """

    def __init__(
        self,
        url: str,
        storage_options: dict[str, Any],
        *,
        request_seconds: float,
        conditional_writes: bool,
        block_bytes: int | None,
    ) -> None:
        super().__init__(block_bytes=block_bytes or BLOCK_BYTES, connections=CONNECTIONS)
        protocol, _, place = url.partition("://")
        self.url = public_url(url).rstrip("/")
        self.redaction = Redaction.of(url, storage_options)
        container, _, base = place.partition("/")
        self.bucket, self.base = container.partition("@")[0], base.strip("/")
        if not conditional_writes:
            raise ConfigError(
                f"{self.url}: storage_options conditional_writes=False is for stores that speak S3; leave it "
                "out, or choose storage_options={'client': 'fsspec'}"
            )
        kind = GcsBucket if protocol in {"gs", "gcs"} else AzureContainer
        with translated_errors(self.url, self.redaction):
            self._place: Bucket = kind(
                url, self.bucket, storage_options, request_seconds, **_time_limits(request_seconds)
            )

    def size_and_token(self, path: str) -> tuple[int, str | None]:
        """Ask for size and metadata of an object."""
        import obstore

        with self._answers(path):
            found = obstore.get(self._place.store, path, options={"head": True})
            return int(found.meta["size"]), found.attributes.get(self._place.metadata)

    def children(self, path: str) -> list[Found]:
        """List the names below a prefix, up to the next slash."""
        prefix = f"{path}/" if path else ""
        with self._answers(path):
            return [
                entry._replace(name=entry.name[len(prefix) :])
                for entry in self._place.entries(prefix, deep=False)
                if entry.name not in {prefix, f"{prefix}{UNFINISHED}"}
            ]

    def below(self, path: str) -> list[str]:
        """List an object, and all below it."""
        found: list[str] = []
        with suppress(FileNotFoundError):
            self.size(path)
            found.append(path)
        with self._answers(path):
            found += [entry.name for entry in self._place.entries(f"{path}/", deep=True)]
        return found

    def remove(self, path: str) -> None:
        """Delete an object."""
        import obstore

        with suppress(FileNotFoundError), self._answers(path):
            obstore.delete(self._place.store, path)

    def replace(self, path: str, content: bytes) -> None:
        """Write a small object, over an existing one."""
        import obstore

        with self._answers(path):
            obstore.put(self._place.store, path, content, use_multipart=False)

    def put_new(self, path: str, content: Sequence[memoryview], token: str) -> None:
        """Create an object in one request."""
        import obstore

        attributes = {self._place.metadata: token}
        with self._answers(path):
            obstore.put(
                self._place.store,
                path,
                list(content),
                mode="create",
                use_multipart=False,
                attributes=attributes,
            )

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Read a range."""
        import obstore

        with self._answers(path):
            content = obstore.get_range(self._place.store, path, start=offset, length=len(buffer))
        with memoryview(content) as view:
            buffer[: len(view)] = view
            return len(view)

    def begin(self, path: str, token: str, *, again: bool) -> Parts:
        """Begin an upload in parts; those of the same token are found again by themselves."""
        del again
        return self._place.parts(path, token, self.path(UNFINISHED))

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> list[str]:
        """Delete parts below the root of objects that were never completed."""
        prefix = self.path(UNFINISHED) + "/"
        abandoned: set[str] = set()
        with self._answers(prefix):
            found = [entry.name for entry in self._place.entries(prefix, deep=True)]
        for path in found:
            # <token>/<key>/<part>
            key = path[len(prefix) :].partition("/")[2].rpartition("/")[0].removeprefix(f"{self.base}/")
            if unwanted(key):
                self.remove(path)
                abandoned.add(key)
        return sorted(abandoned)

    @contextmanager
    def _answers(self, path: str) -> Generator[None]:
        try:
            with translated_errors(self.url, self.redaction):
                yield
        except FileNotFoundError:
            # obstore's text is the whole answer.
            raise FileNotFoundError(errno.ENOENT, "no such object", self.shown(path)) from None


def _time_limits(seconds: float) -> dict[str, Any]:
    """Return obstore's time-outs and retries that fit into `seconds`."""
    one_try = timedelta(seconds=max(1.0, seconds / 4))
    return {
        "client_options": {
            "connect_timeout": min(one_try, timedelta(seconds=10)),
            "timeout": one_try,
        },
        "retry_config": {
            "max_retries": attempts_within(seconds) - 1,
            "retry_timeout": timedelta(seconds=seconds * 3 / 4),
        },
    }
