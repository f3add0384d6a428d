"""S3 through botocore: large bodies go from and to where they lie in memory.

botocore knows credentials, endpoints, signatures, retries and errors. Parts of objects bypass only its
reading of files: their memory goes to the socket in slices.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any, Final, final

from ckpt_core.disclosure import Redaction, logger_of, public_url
from ckpt_core.storage.object._client import Found
from ckpt_core.storage.object._parts import BLOCK_BYTES, MOST_PARTS, PartClient, Parts, mark
from ckpt_core.storage.object._s3_options import S3Settings
from ckpt_core.storage.object._translation import answer_ended, late, translated_errors

_METADATA: Final = "ckpt-upload"
_SLICE_BYTES: Final = 2**20
_READ_TRIES: Final = 4
_CLEANING_SHARE: Final = 0.25
# Answers after which botocore makes no further try: damage on the way, and two creations at the same moment.
_AGAIN: Final = {
    ("put_object", "BadDigest"),
    ("put_object", "ConditionalRequestConflict"),
    ("upload_part", "BadDigest"),
}
_TRIES_AGAIN: Final = 3

_logger = logger_of(__name__)
# It holds the token of its upload, which no listing of uploads shows, and is never a part of an object.
_TOKEN_PART: Final = MOST_PARTS + 1


@final
class S3Client(PartClient):
    """A bucket of S3, or of a service that speaks its language.

    Args:
        url: of the root.
        storage_options: in the words of s3fs.
        request_seconds: the time limit of one request, retries included.
        conditional_writes: whether to create objects only if there is none.
        block_bytes: size of the parts of an upload; None for the default.

    Raises:
        ConfigError: an option cannot be translated, or botocore refuses it.
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
        self.url = public_url(url).rstrip("/")
        self.redaction = Redaction.of(url, storage_options)
        settings = S3Settings.of(self.url, storage_options, request_seconds, self.redaction)
        super().__init__(block_bytes=block_bytes or BLOCK_BYTES, connections=settings.connections)
        self.bucket, _, base = url.partition("://")[2].partition("/")
        self.base = base.strip("/")
        self._condition: dict[str, Any] = {"IfNoneMatch": "*"} if conditional_writes else {}
        self._settings = settings
        self._seconds = request_seconds
        self._guard = threading.Lock()
        self._warned = False
        self._made: Any = None
        self._deadline = threading.local()

    def size_and_token(self, path: str) -> tuple[int, str | None]:
        """Ask for size and metadata of an object."""
        found = self.call("head_object", Key=path)
        return int(found["ContentLength"]), found.get("Metadata", {}).get(_METADATA)

    def children(self, path: str) -> list[Found]:
        """List the names below a prefix, up to the next slash."""
        prefix = f"{path}/" if path else ""
        found: list[Found] = []
        for page in self._pages("list_objects_v2", Prefix=prefix, Delimiter="/"):
            directories = [str(entry["Prefix"])[:-1] for entry in page.get("CommonPrefixes", [])]
            sizes = {str(entry["Key"]): int(entry["Size"]) for entry in page.get("Contents", [])}
            found += [Found(name[len(prefix) :], is_directory=True, size_bytes=0) for name in directories]
            found += [
                Found(name[len(prefix) :], is_directory=False, size_bytes=sizes[name]) for name in sizes
            ]
        return [each for each in found if each.name or each.is_directory]

    def below(self, path: str) -> list[str]:
        """List an object, which is found even if listings do not show it yet, and all below it."""
        found: list[str] = []
        with suppress(FileNotFoundError):
            self.size(path)
            found.append(path)
        for page in self._pages("list_objects_v2", Prefix=f"{path}/"):
            found += [str(entry["Key"]) for entry in page.get("Contents", [])]
        return found

    def remove(self, path: str) -> None:
        """Delete an object."""
        with suppress(FileNotFoundError):
            self.call("delete_object", Key=path)

    def replace(self, path: str, content: bytes) -> None:
        """Write a small object, over an existing one."""
        self._put(path, [memoryview(content)])

    def put_new(self, path: str, content: Sequence[memoryview], token: str) -> None:
        """Create an object in one request."""
        self._put(path, content, **self._marked(token), **self._condition)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Read a range."""
        return self.read_spread(path, offset, [buffer])

    def read_spread(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Read a range into several buffers: a request takes milliseconds of CPU, whatever its length."""
        done = 0
        last = offset + sum(map(len, buffers)) - 1
        with translated_errors(self.url, self.redaction), self._limit():
            for attempt in range(_READ_TRIES):
                # What has arrived is not asked for again.
                answer = self._ask("get_object", Key=path, Range=f"bytes={offset + done}-{last}")
                wanted = done + int(answer["ContentLength"])
                with answer["Body"] as body:
                    done += self._receive(body, _part(buffers, done, wanted))
                if done >= wanted:
                    return done
                time.sleep(0.1 * 2**attempt)
        raise answer_ended(self.url)

    def begin(self, path: str, token: str, *, again: bool) -> Parts:
        """Begin an upload in parts."""
        if again:
            for upload in self._uploads(path):
                parts = S3Parts(self, path, upload, self._condition)
                if path == upload["Key"] and parts.has_token(token):
                    return parts
        algorithm: dict[str, Any] = {"ChecksumAlgorithm": "CRC32"} if self._settings.checksums else {}
        upload = self.call("create_multipart_upload", Key=path, **algorithm, **self._marked(token))
        parts = S3Parts(self, path, upload, self._condition)
        if again:
            parts.put_token(token)
        return parts

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> list[str]:
        """Abort uploads below the root that were never completed; S3 bills them."""
        prefix = f"{self.base}/" if self.base else ""
        found = [upload for upload in self._uploads(prefix) if unwanted(upload["Key"][len(prefix) :])]
        for upload in found:
            S3Parts(self, upload["Key"], upload, {}).abandon()
        return sorted(upload["Key"][len(prefix) :] for upload in found)

    def call(self, operation: str, *, cleaning: bool = False, **arguments: Any) -> dict[str, Any]:
        """Send one request of the bucket, and further tries.

        `cleaning` is for calls after a failure, which get less time.

        Raises:
            OSError: see `translated_errors`.
        """
        with translated_errors(self.url, self.redaction), self._limit(_CLEANING_SHARE if cleaning else 1):
            return self._ask(operation, **arguments)

    def checksum(self, mark: str) -> dict[str, Any]:
        """Return the argument by which the service checks content, if it is to do so."""
        return {"ChecksumCRC32": _header(mark)} if self._settings.checksums else {}

    def note_unchecked(self, answer: Mapping[str, Any]) -> None:
        """Warn once if the answer to a part does not confirm its checksum."""
        if self._settings.checksums and not self._warned and "ChecksumCRC32" not in answer:
            self._warned = True
            _logger.warning(
                "%s: the object store does not confirm checksums (x-amz-checksum-crc32), so damage on the "
                "way is found when a checkpoint is read, and uploads that were cut off begin anew; "
                "storage_options={'checksums': False} sends none",
                self.url,
            )

    def _put(self, path: str, content: Sequence[memoryview], **more: Any) -> None:
        self.call("put_object", Key=path, Body=_Body(content), **self.checksum(mark(content)), **more)

    def _marked(self, token: str) -> dict[str, Any]:
        known = self._settings.additional.get("Metadata", {})
        return {"Metadata": {**known, _METADATA: token}}

    def _uploads(self, prefix: str) -> list[dict[str, Any]]:
        pages = self._pages("list_multipart_uploads", Prefix=prefix)
        found = [upload for page in pages for upload in page.get("Uploads", [])]
        return [upload for upload in found if str(upload["Key"]).startswith(prefix)]

    def _pages(self, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        client = self._client()
        with translated_errors(self.url, self.redaction):
            names = client.get_paginator(operation)
        arguments = self._settings.known(client, operation, {"Bucket": self.bucket, **arguments})
        with translated_errors(self.url, self.redaction), self._limit():
            yield from names.paginate(**arguments)

    def _ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        client = self._client()
        arguments = self._settings.known(client, operation, {"Bucket": self.bucket, **arguments})
        act: Callable[..., dict[str, Any]] = getattr(client, operation)
        for _ in range(_TRIES_AGAIN - 1):
            try:
                return act(**arguments)
            except ClientError as error:
                if (operation, error.response.get("Error", {}).get("Code")) not in _AGAIN:
                    raise
        return act(**arguments)

    def _receive(self, body: Any, buffers: Sequence[memoryview]) -> int:
        """Read from an answer; return how many bytes came before it ended."""
        from urllib3.exceptions import HTTPError

        # urllib3 copies twice; the answer of `http.client` in it receives straight into place.
        receive = getattr(body, "_fp", body).readinto
        done = 0
        for buffer in buffers:
            start = 0
            while start < len(buffer):
                self._check_deadline()
                count = 0
                with suppress(HTTPError, HTTPException, OSError):
                    count = receive(buffer[start : start + _SLICE_BYTES])
                if not count:
                    return done
                start, done = start + count, done + count
        if body.closed:
            body.release_conn()  # for the next request; an answer that is not over is closed with it
        return done

    def _client(self) -> Any:
        with self._guard:
            if self._made is None:
                with translated_errors(self.url, self.redaction):
                    self._made = self._settings.connect(self.url, self.redaction)
                self._made.meta.events.register("before-send.s3", self._before_send)
            return self._made

    def _before_send(self, request: Any, **_: Any) -> None:
        """Let the memory itself be sent, and begin no try too late."""
        self._check_deadline()
        if isinstance(request.body, _Body):
            request.body = _Slices(request.body.content, self._check_deadline)

    @contextmanager
    def _limit(self, share: float = 1) -> Generator[None]:
        from botocore.exceptions import ConnectTimeoutError, ReadTimeoutError

        self._deadline.at = time.monotonic() + self._seconds * share
        try:
            yield
        except (ConnectTimeoutError, ReadTimeoutError) as error:
            raise late(self.url, self._seconds) from error

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline.at:
            raise late(self.url, self._seconds)


def _part(buffers: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return the memory of bytes `start` to `stop` of what fills the buffers."""
    found: list[memoryview] = []
    for buffer in buffers:
        found.append(buffer[max(start, 0) : max(stop, 0)])
        start, stop = start - len(buffer), stop - len(buffer)
    return found


@final
class S3Parts:
    """A new object of S3 that arrives in parts; S3 compares each with its checksum."""

    def __init__(
        self, client: S3Client, path: str, upload: dict[str, Any], condition: dict[str, Any]
    ) -> None:
        self._client = client
        self._condition = condition
        self._place: dict[str, Any] = {"Key": path, "UploadId": str(upload["UploadId"])}
        self._arrived: dict[str, dict[str, str]] = {}
        self._complete = False

    def name_of(self, number: int, mark: str) -> str:
        """Name a part by its place and the checksum of its content."""
        return f"{number + 1}-{mark}"

    def there(self) -> frozenset[str]:
        """Return the names of the parts that have arrived."""
        if not self._arrived:
            self._list()
        return frozenset(self._arrived)

    def has_token(self, token: str) -> bool:
        """Return whether the upload was begun with that token, or is certainly gone."""
        with suppress(FileNotFoundError):
            return self.name_of(_TOKEN_PART - 1, mark([_token_part(token)])) in self.there()
        return False

    def put_token(self, token: str) -> None:
        """Tell later calls whose upload this is."""
        content = [_token_part(token)]
        self.send(self.name_of(_TOKEN_PART - 1, mark(content)), content)

    def send(self, name: str, content: Sequence[memoryview]) -> None:
        """Send one part, from where it lies in memory."""
        number, _, checksum = name.partition("-")
        place: dict[str, Any] = {"PartNumber": int(number), **self._place}
        checked = self._client.checksum(checksum)
        answer = self._client.call("upload_part", Body=_Body(content), **checked, **place)
        self._client.note_unchecked(answer)
        self._arrived[name] = _known(answer)

    def complete(self, names: Sequence[str]) -> None:
        """Make the object."""
        parts = [{"PartNumber": int(name.partition("-")[0]), **self._arrived[name]} for name in names]
        self._client.call(
            "complete_multipart_upload", MultipartUpload={"Parts": parts}, **self._place, **self._condition
        )
        self._complete = True

    def abandon(self) -> None:
        """Abort the upload, if it is not complete."""
        if not self._complete:
            with suppress(FileNotFoundError):
                self._client.call("abort_multipart_upload", cleaning=True, **self._place)

    def _list(self) -> None:
        marker = 0
        while True:
            page = self._client.call("list_parts", PartNumberMarker=marker, **self._place)
            for part in page.get("Parts", []):
                if checksum := part.get("ChecksumCRC32"):
                    name = self.name_of(part["PartNumber"] - 1, _hexadecimal(checksum))
                    self._arrived[name] = _known(part)
            if not page.get("IsTruncated"):
                return
            marker = int(page["NextPartNumberMarker"])


@final
class _Body:
    """The body of a request, which botocore takes for a file."""

    def __init__(self, content: Sequence[memoryview]) -> None:
        self.content = content

    def __len__(self) -> int:
        return sum(map(len, self.content))

    def read(self, count: int = -1) -> bytes:
        """Be a file; `_Slices` are sent instead."""
        raise NotImplementedError(count)


@final
class _Slices:
    """The memory of a body in slices: a time limit of the socket is one of each."""

    def __init__(self, content: Sequence[memoryview], check: Callable[[], None]) -> None:
        self._content = content
        self._check = check

    def __iter__(self) -> Generator[memoryview]:
        for piece in self._content:
            for start in range(0, len(piece), _SLICE_BYTES):
                self._check()
                yield piece[start : start + _SLICE_BYTES]

    def seek(self, position: int) -> None:
        """Do nothing, before another try: every iteration begins anew."""


def _known(part: Mapping[str, Any]) -> dict[str, str]:
    """Return by what the service knows a part."""
    return {name: str(part[name]) for name in ("ETag", "ChecksumCRC32") if part.get(name)}


def _header(checksum: str) -> str:
    """Return a CRC-32 as S3 writes it."""
    return base64.b64encode(bytes.fromhex(checksum)).decode()


def _hexadecimal(header: str) -> str:
    return base64.b64decode(header).hex()


def _token_part(token: str) -> memoryview:
    return memoryview(token.encode())
