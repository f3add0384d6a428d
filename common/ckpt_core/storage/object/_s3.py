"""S3 through botocore: large bodies go from and to where they lie in memory.

botocore knows credentials, endpoints, signatures, retries and errors. Parts of objects bypass only its
reading of files: their memory goes to the socket in slices.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, final

from ckpt_core.disclosure import Redaction, public_url
from ckpt_core.storage._base import StorageEntry
from ckpt_core.storage._keys import file_key
from ckpt_core.storage.object._parts import MOST_PARTS, PartedObject, PartStorage, mark
from ckpt_core.storage.object._s3_options import S3Settings
from ckpt_core.storage.object._s3_requests import Body, S3Requests
from ckpt_core.storage.object._storage import RequestTerms

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
        known = self._settings.additional.get("Metadata", {})
        return {"Metadata": {**known, _METADATA: token}}

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
