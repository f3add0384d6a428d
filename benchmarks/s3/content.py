"""Buckets, objects and unfinished uploads, in memory."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple, final

from benchmarks.s3.blocks import Block

_numbers = itertools.count(1)


class S3Error(Exception):
    """What the client is told."""

    def __init__(self, status: HTTPStatus, code: str, message: str = "") -> None:
        super().__init__(message or code)
        self.status = status
        self.code = code


class Part(NamedTuple):
    """One body: of a whole object, or of one part of it."""

    block: Block
    etag: str
    checksums: Mapping[str, str]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """An object as it is served; `headers` are those that a GET repeats."""

    blocks: tuple[Block, ...]
    etag: str
    headers: Mapping[str, str]
    checksums: Mapping[str, str]
    modified: float = field(default_factory=time.time)

    @property
    def size_bytes(self) -> int:
        """Of all blocks."""
        return sum(block.size_bytes for block in self.blocks)

    @property
    def modified_text(self) -> str:
        """For a header."""
        return formatdate(self.modified, usegmt=True)

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the memory of a range."""
        position = 0
        for block in self.blocks:
            first, last = max(start - position, 0), min(stop - position, block.size_bytes)
            if first < last:
                yield block.view(first, last)
            position += block.size_bytes


@final
@dataclass(kw_only=True, slots=True)
class Upload:
    """A multipart upload that is neither completed nor aborted."""

    key: str
    headers: Mapping[str, str]
    parts: dict[int, Part] = field(default_factory=dict[int, Part])


@final
class Bucket:
    """One bucket. Concurrency: all methods may be called from several threads."""

    def __init__(self) -> None:
        self.uploads: dict[str, Upload] = {}
        self._objects: dict[str, StoredObject] = {}
        self._guard = threading.Lock()

    def get(self, key: str) -> StoredObject:
        """Return an object, or raise `NoSuchKey`."""
        found = self._objects.get(key)
        if found is None:
            raise S3Error(HTTPStatus.NOT_FOUND, "NoSuchKey", key)
        return found

    def put(self, key: str, content: StoredObject, allowed: Callable[[StoredObject | None], bool]) -> None:
        """Store an object if `allowed` says so of the one that is there."""
        with self._guard:
            if not allowed(self._objects.get(key)):
                raise S3Error(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed", key)
            self._objects[key] = content

    def delete(self, key: str) -> None:
        """Delete an object; no-op if there is none."""
        self._objects.pop(key, None)

    def items(self, prefix: str) -> list[tuple[str, StoredObject]]:
        """Return the objects whose keys begin with `prefix`, in order."""
        with self._guard:
            return sorted(
                ((key, each) for key, each in self._objects.items() if key.startswith(prefix)),
                key=lambda pair: pair[0].encode(),
            )

    def upload(self, upload_id: str) -> Upload:
        """Return an unfinished upload, or raise `NoSuchUpload`."""
        found = self.uploads.get(upload_id)
        if found is None:
            raise S3Error(HTTPStatus.NOT_FOUND, "NoSuchUpload", upload_id)
        return found

    def complete(self, upload_id: str, named: Iterable[tuple[int, str]]) -> tuple[Upload, list[Part]]:
        """Return the upload and its named parts; it stays until the caller drops it."""
        found = self.upload(upload_id)
        parts: list[Part] = []
        for number, etag in named:
            part = found.parts.get(number)
            if part is None or part.etag.strip('"') != etag.strip('"'):
                raise S3Error(HTTPStatus.BAD_REQUEST, "InvalidPart", f"part {number}")
            parts.append(part)
        if not parts:
            raise S3Error(HTTPStatus.BAD_REQUEST, "MalformedXML", "no parts")
        return found, parts


def new_etag(suffix: str = "") -> str:
    """Return an entity tag that no other body has; it is no digest, which would cost more than the copy."""
    return f'"{next(_numbers):032x}{suffix}"'


def new_upload_id() -> str:
    """Return an id that no other upload has."""
    return f"upload-{next(_numbers):016x}"
