"""S3 through botocore: large bodies go from and to where they lie in memory.

botocore knows credentials, endpoints, signatures, retries and errors. Parts of objects bypass only its
reading of files: their memory goes to the socket in slices.
"""

from __future__ import annotations

import base64
import errno
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final, Self, final
from weakref import WeakSet

from ckpt_core.disclosure import Redaction, logger_of, public_url
from ckpt_core.storage._base import StorageEntry, file_key
from ckpt_core.storage.object._parts import CONNECTIONS, MOST_PARTS, PartedObject, PartStorage, mark
from ckpt_core.storage.object._storage import RequestTerms
from ckpt_core.storage.object._translation import (
    answer_ended,
    late,
    refuse_others,
    refused,
    translated_errors,
)

if TYPE_CHECKING:
    from botocore.config import Config

_MOST_ATTEMPTS: Final = 6
_KEYS: Final = {
    "key": "aws_access_key_id",
    "username": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "password": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "endpoint_url",
    "use_ssl": "use_ssl",
}
_OTHERS: Final = (
    "anon",
    "checksums",
    "client_kwargs",
    "config_kwargs",
    "max_concurrency",
    "profile",
    "requester_pays",
    "s3_additional_kwargs",
)
_OPERATIONS: Final = (
    "abort_multipart_upload",
    "complete_multipart_upload",
    "create_multipart_upload",
    "delete_object",
    "get_object",
    "head_object",
    "list_objects_v2",
    "put_object",
    "upload_part",
)
# What only the caches and files of fsspec need.
_WITHOUT_EFFECT: Final = (
    "cache_regions",
    "default_block_size",
    "default_cache_type",
    "default_fill_cache",
    "fixed_upload_size",
    "listings_expiry_time",
    "max_paths",
    "skip_instance_cache",
    "use_listings_cache",
)


def time_limits(seconds: float) -> dict[str, Any]:
    """Return botocore's time-outs and retries that fit into `seconds`."""
    # So many tries fit if the waits between them double from at most 1 s on.
    attempts = max(2, min(int(math.log2(seconds / 2 + 1)) + 1, _MOST_ATTEMPTS))
    return {
        "connect_timeout": max(1.0, min(10.0, seconds / 4)),
        "read_timeout": max(1.0, min(60.0, seconds / 4)),
        "retries": {"mode": "standard", "total_max_attempts": attempts},
    }


@final
@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class S3Settings:
    """How to reach S3, by how many connections for an object; whether to let it check."""

    session: Mapping[str, Any]
    client: Mapping[str, Any]
    config: Config
    additional: Mapping[str, Any]
    connections: int
    checksums: bool

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any], seconds: float, redaction: Redaction) -> Self:
        """Translate options; ConfigError names those that have no translation."""
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        refuse_others(url, options, {*_KEYS, *_OTHERS, *_WITHOUT_EFFECT}, "botocore")
        given = {_KEYS[name]: value for name, value in options.items() if name in _KEYS and value is not None}
        connections = int(options.get("max_concurrency") or CONNECTIONS)
        user = dict(options.get("config_kwargs") or {})
        _refuse_other_checksums(url, options)
        config = {
            "max_pool_connections": 4 * connections,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **time_limits(seconds),
            **user,
            # The checksum is signed instead of a second one of the content.
            "s3": {**(user.get("s3") or {}), "payload_signing_enabled": False},
        }
        if options.get("anon"):
            config["signature_version"] = UNSIGNED
        payer = {"RequestPayer": "requester"} if options.get("requester_pays") else {}
        try:
            made = Config(**config)  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, BotoCoreError) as error:
            raise refused(url, "botocore", options, error=error, redaction=redaction) from None
        return cls(
            session={"profile": options["profile"]} if options.get("profile") else {},
            client={**given, **(options.get("client_kwargs") or {})},
            config=made,
            additional={**payer, **(options.get("s3_additional_kwargs") or {})},
            connections=connections,
            checksums=bool(options.get("checksums", True)),
        )

    def connect(self, url: str, redaction: Redaction) -> Any:
        """Make botocore's client, which asks for credentials when it first needs them."""
        from botocore.session import Session

        try:
            session: Any = Session(**self.session)  # type: ignore[no-untyped-call]
            session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
            client = session.create_client("s3", config=self.config, **self.client)
        except (ValueError, TypeError) as error:
            raise refused(url, "botocore", self.client, error=error, redaction=redaction) from None
        taken = {name for operation in _OPERATIONS for name in _members(client, operation)}
        known = [f"s3_additional_kwargs {name}" for name in taken]
        refuse_others(url, {f"s3_additional_kwargs {name}": 0 for name in self.additional}, known, "botocore")
        return client

    def known(self, client: Any, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        members = _members(client, operation)
        more = {name: value for name, value in self.additional.items() if name in members}
        return {**more, **arguments}


@cache
def _loader(search_path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(search_path)  # type: ignore[no-untyped-call]


def _members(client: Any, operation: str) -> Collection[str]:
    name = client.meta.method_to_api_mapping[operation]
    members: Collection[str] = client.meta.service_model.operation_model(name).input_shape.members
    return members


def _refuse_other_checksums(url: str, options: Mapping[str, Any]) -> None:
    """Refuse other checksums, and signatures of content: only the CRC-32 is made."""
    additional = options.get("s3_additional_kwargs") or {}
    others = [f"s3_additional_kwargs {name}" for name in additional if name.startswith("Checksum")]
    if ((options.get("config_kwargs") or {}).get("s3") or {}).get("payload_signing_enabled"):
        others.append("config_kwargs s3 payload_signing_enabled")
    refuse_others(url, dict.fromkeys(others), (), "botocore")


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
_NO_SUCH_RANGE: Final = 416

_logger = logger_of(__name__)


@final
class S3Requests:
    """Requests to one bucket, each within so many seconds, further tries included."""

    def __init__(
        self, url: str, bucket: str, settings: S3Settings, *, redaction: Redaction, seconds: float
    ) -> None:
        self.url = url
        self.bucket = bucket
        self.redaction = redaction
        self._settings = settings
        self._seconds = seconds
        self._guard = threading.Lock()
        self._warned = False
        self._made: Any = None
        self._sockets: WeakSet[Any] = WeakSet()
        self._round = 0
        self._deadline = threading.local()

    def call(self, operation: str, *, cleaning: bool = False, **arguments: Any) -> dict[str, Any]:
        """Send one request of the bucket, and further tries.

        `cleaning` is for calls after a failure, which get less time. Errors as of `translated_errors`.
        """
        with translated_errors(self.url, self.redaction), self._limit(_CLEANING_SHARE if cleaning else 1):
            return self._ask(operation, **arguments)

    def read_spread(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Read a range into several buffers: each request takes milliseconds of CPU."""
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

    def read_start(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Return the size and first bytes of an object: an answer has both."""
        from botocore.exceptions import ClientError

        with translated_errors(self.url, self.redaction), self._limit():
            try:
                answer = self._ask("get_object", Key=path, Range=f"bytes=0-{most_bytes - 1}")
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] != _NO_SUCH_RANGE:
                    raise
                return 0, b""  # an empty object has no first byte
            length = int(answer["ContentLength"])
            size = int(str(answer.get("ContentRange", length)).rpartition("/")[2])
            start = memoryview(bytearray(min(length, most_bytes)))
            with answer["Body"] as body:
                done = self._receive(body, [start])
        if done < len(start):
            self.read_spread(path, done, [start[done:]])
        return size, bytes(start)

    def pages(self, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        client = self._client()
        with translated_errors(self.url, self.redaction):
            names = client.get_paginator(operation)
        arguments = self._settings.known(client, operation, {"Bucket": self.bucket, **arguments})
        with translated_errors(self.url, self.redaction), self._limit():
            yield from names.paginate(**arguments)

    def checksum(self, mark: str) -> dict[str, Any]:
        """Return the argument by which the service checks content, if it is to do so."""
        return {"ChecksumCRC32": crc32_header(mark)} if self._settings.checksums else {}

    def note_unchecked(self, answer: Mapping[str, Any]) -> None:
        """Warn once if the answer to a part does not confirm its checksum."""
        if self._settings.checksums and not self._warned and "ChecksumCRC32" not in answer:
            self._warned = True
            _logger.warning(
                "%s: the object store does not confirm checksums (x-amz-checksum-crc32), so damage on "
                "the way is found when a checkpoint is read, and uploads that were cut off start from zero; "
                "storage_options={'checksums': False} sends none",
                self.url,
            )

    def interrupt(self) -> None:
        with self._guard:
            self._round += 1
            sockets = list(self._sockets)
        for connected in sockets:
            with suppress(OSError):
                # Wakes up the thread that waits for an answer, which `close` does not.
                connected.shutdown(socket.SHUT_RDWR)

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
                _watch(self._made, self._note_socket)
                self._made.meta.events.register("before-send.s3", self._before_send)
            return self._made

    def _before_send(self, request: Any, **_: Any) -> None:
        """Let the memory itself be sent, and begin no try too late."""
        self._check_deadline()
        if isinstance(request.body, Body):
            request.body = _Slices(request.body.content, self._check_deadline)

    @contextmanager
    def _limit(self, share: float = 1) -> Generator[None]:
        from botocore.exceptions import ConnectTimeoutError, ReadTimeoutError

        self._deadline.at = time.monotonic() + self._seconds * share
        self._deadline.round = self._round
        try:
            yield
        except (ConnectTimeoutError, ReadTimeoutError) as error:
            raise late(self.url, self._seconds) from error

    def _note_socket(self, connected: Any) -> None:
        with self._guard:
            self._sockets.add(connected)

    def _check_deadline(self) -> None:
        if self._deadline.round != self._round:
            raise InterruptedError(errno.EINTR, "cancelled, as the process ends", self.url)
        if time.monotonic() > self._deadline.at:
            raise late(self.url, self._seconds)


def _watch(client: Any, note: Callable[[Any], None]) -> None:
    """Let `note` know every socket that botocore opens.

    A botocore whose pools are elsewhere is not watched: its requests end at their time limits.
    """
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    pools = getattr(session, "_pool_classes_by_scheme", None)
    if not isinstance(pools, dict):
        return
    for scheme, pool in list(pools.items()):
        kind: Any = pool.ConnectionCls

        class Watched(kind):  # type: ignore[misc]
            def connect(self) -> None:
                super().connect()
                note(self.sock)

        pools[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": Watched})


def _part(buffers: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    found: list[memoryview] = []
    for buffer in buffers:
        found.append(buffer[max(start, 0) : max(stop, 0)])
        start, stop = start - len(buffer), stop - len(buffer)
    return found


@final
class Body:
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
        """Do nothing, before another try: every iteration starts at the beginning."""


def crc32_header(checksum: str) -> str:
    return base64.b64encode(bytes.fromhex(checksum)).decode()


_METADATA: Final = "ckpt-upload"
# It holds the token of its upload, which no listing of uploads shows, and is never a part of an object.
_TOKEN_PART: Final = MOST_PARTS + 1


@final
class S3Storage(PartStorage):
    """A bucket of S3, or of a service that speaks its language; options as of s3fs."""

    reads_in_place = True

    def __init__(self, url: str, storage_options: dict[str, Any], terms: RequestTerms) -> None:
        seconds = terms.request_seconds
        secrets = Redaction.of(url, storage_options)
        settings = S3Settings.of(public_url(url).rstrip("/"), storage_options, seconds, secrets)
        super().__init__(
            url, storage_options, block_bytes=terms.block_bytes, connections=settings.connections
        )
        self._condition: dict[str, Any] = {"IfNoneMatch": "*"} if terms.conditional_writes else {}
        self._settings = settings
        self._requests = S3Requests(
            self.url, self.bucket, settings, redaction=self.redaction, seconds=seconds
        )

    def size_and_token(self, path: str) -> tuple[int, str | None]:
        found = self._requests.call("head_object", Key=path)
        return int(found["ContentLength"]), found.get("Metadata", {}).get(_METADATA)

    def listed(self, prefix: str, delimiter: str) -> Sequence[StorageEntry]:
        found: list[StorageEntry] = []
        until = {"Delimiter": delimiter} if delimiter else {}
        for page in self._requests.pages("list_objects_v2", Prefix=prefix, **until):
            names = [str(entry["Prefix"])[:-1] for entry in page.get("CommonPrefixes", [])]
            found += [StorageEntry(name, is_directory=True, size_bytes=0) for name in names]
            found += [
                StorageEntry(str(entry["Key"]), is_directory=False, size_bytes=int(entry["Size"]))
                for entry in page.get("Contents", [])
            ]
        return found

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._requests.call("delete_object", Key=path)

    def replace(self, key: str, content: bytes) -> None:
        self._put(self.path(file_key(key)), [memoryview(content)])

    def put_new(self, path: str, content: Sequence[memoryview], token: str) -> None:
        self._put(path, content, **self._marked(token), **self._condition)

    def read_start(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        return self._requests.read_start(path, most_bytes)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        return self._requests.read_spread(path, offset, [buffer])

    def read_spread(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        return self._requests.read_spread(path, offset, buffers)

    def begin(self, path: str, token: str, *, again: bool) -> PartedObject:
        if again:
            for upload in self._uploads(path):
                parts = S3Parts(self._requests, path, upload, self._condition)
                if path == upload["Key"] and parts.has_token(token):
                    return parts
        algorithm: dict[str, Any] = {"ChecksumAlgorithm": "CRC32"} if self._settings.checksums else {}
        upload = self._requests.call("create_multipart_upload", Key=path, **algorithm, **self._marked(token))
        parts = S3Parts(self._requests, path, upload, self._condition)
        if again:  # tells later calls whose upload this is
            content = [_token_part(token)]
            parts.send(parts.name_of(_TOKEN_PART - 1, mark(content)), content)
        return parts

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> list[str]:
        """Abort uploads below the root that were never completed; S3 bills them."""
        prefix = f"{self.base}/" if self.base else ""
        found = [upload for upload in self._uploads(prefix) if unwanted(upload["Key"][len(prefix) :])]
        for upload in found:
            S3Parts(self._requests, upload["Key"], upload, {}).abandon()
        return sorted(upload["Key"][len(prefix) :] for upload in found)

    def interrupt(self) -> None:
        self._requests.interrupt()

    def _put(self, path: str, content: Sequence[memoryview], **more: Any) -> None:
        checked = self._requests.checksum(mark(content))
        self._requests.call("put_object", Key=path, Body=Body(content), **checked, **more)

    def _marked(self, token: str) -> dict[str, Any]:
        return {"Metadata": {**self._settings.additional.get("Metadata", {}), _METADATA: token}}

    def _uploads(self, prefix: str) -> list[dict[str, Any]]:
        pages = self._requests.pages("list_multipart_uploads", Prefix=prefix)
        found = [upload for page in pages for upload in page.get("Uploads", [])]
        return [upload for upload in found if str(upload["Key"]).startswith(prefix)]


@final
class S3Parts:
    """A new object of S3 that arrives in parts; S3 compares each with its checksum."""

    def __init__(
        self, requests: S3Requests, path: str, upload: dict[str, Any], condition: dict[str, Any]
    ) -> None:
        self._requests = requests
        self._condition = condition
        self._place: dict[str, Any] = {"Key": path, "UploadId": str(upload["UploadId"])}
        self._arrived: dict[str, dict[str, str]] = {}
        self._complete = False

    def name_of(self, number: int, mark: str) -> str:
        return f"{number + 1}-{mark}"

    def there(self) -> frozenset[str]:
        if not self._arrived:
            self._list()
        return frozenset(self._arrived)

    def has_token(self, token: str) -> bool:
        """Return whether the upload was begun with that token, or is certainly gone."""
        with suppress(FileNotFoundError):
            return self.name_of(_TOKEN_PART - 1, mark([_token_part(token)])) in self.there()
        return False

    def send(self, name: str, content: Sequence[memoryview]) -> None:
        number, _, checksum = name.partition("-")
        place: dict[str, Any] = {"PartNumber": int(number), **self._place}
        checked = self._requests.checksum(checksum)
        answer = self._requests.call("upload_part", Body=Body(content), **checked, **place)
        self._requests.note_unchecked(answer)
        self._arrived[name] = _known(answer)

    def complete(self, names: Sequence[str]) -> None:
        parts = [{"PartNumber": int(name.partition("-")[0]), **self._arrived[name]} for name in names]
        self._requests.call(
            "complete_multipart_upload", MultipartUpload={"Parts": parts}, **self._place, **self._condition
        )
        self._complete = True

    def abandon(self) -> None:
        if not self._complete:
            with suppress(FileNotFoundError):
                self._requests.call("abort_multipart_upload", cleaning=True, **self._place)

    def _list(self) -> None:
        marker = 0
        while True:
            page = self._requests.call("list_parts", PartNumberMarker=marker, **self._place)
            for part in page.get("Parts", []):
                if checksum := part.get("ChecksumCRC32"):
                    name = self.name_of(part["PartNumber"] - 1, base64.b64decode(checksum).hex())
                    self._arrived[name] = _known(part)
            if not page.get("IsTruncated"):
                return
            marker = int(page["NextPartNumberMarker"])


def _known(part: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(part[name]) for name in ("ETag", "ChecksumCRC32") if part.get(name)}


def _token_part(token: str) -> memoryview:
    return memoryview(token.encode())
