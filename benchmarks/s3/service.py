"""The operations of S3 that clients of checkpoints use; signatures are not checked."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from itertools import islice
from typing import NamedTuple, final
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from benchmarks.s3.content import (
    Bucket,
    Part,
    S3Error,
    StoredObject,
    Upload,
    new_etag,
    new_upload_id,
)
from benchmarks.s3.wire import Connection, Received

_CHECKSUM = "x-amz-checksum-"
_KEPT = ("content-type", "content-encoding", "cache-control")
_XML = '<?xml version="1.0" encoding="UTF-8"?>'
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class Answer(NamedTuple):
    """What goes back; without `size_bytes` it is the length of the text."""

    status: HTTPStatus = HTTPStatus.OK
    text: str = ""
    headers: Mapping[str, str] = {}
    views: Iterable[memoryview] = ()
    size_bytes: int | None = None


@final
class Service:
    """All buckets. Concurrency: `serve` runs on one thread for each connection."""

    def __init__(self, buckets: Iterable[str], *, verifies: bool) -> None:
        """Make empty buckets; `verifies`: compare CRC-32 and SHA-256 of bodies with those that were sent."""
        self._buckets = {name: Bucket() for name in buckets}
        self._verifies = verifies
        self._guard = threading.Lock()
        self.requests: Counter[str] = Counter()

    def serve(self, connection: Connection, request: Received) -> None:
        """Answer one request."""
        try:
            answer = self._answer(connection, request)
        except S3Error as error:
            text = f"{_XML}<Error><Code>{error.code}</Code><Message>{escape(str(error))}</Message></Error>"
            answer = Answer(error.status, text)
        content = answer.text.encode()
        headers = {"content-type": "application/xml", **answer.headers} if content else answer.headers
        body: Iterable[memoryview | bytes] = [content] if content else answer.views
        size_bytes = len(content) if answer.size_bytes is None else answer.size_bytes
        connection.answer(
            answer.status, headers, () if request.method == "HEAD" else body, size_bytes=size_bytes
        )

    def _answer(self, connection: Connection, request: Received) -> Answer:
        name, _, key = request.path.removeprefix("/").partition("/")
        has_body = request.method in {"PUT", "POST"} and (request.body_bytes or request.is_framed)
        body = connection.body(request) if has_body or request.method == "PUT" else None
        content = Part(body[0], new_etag(), _checksums(request.headers, body[1])) if body else None
        if content is not None and self._verifies:
            _verify(content)
        if request.method == "PUT" and not key:
            self._buckets.setdefault(name, Bucket())
            return self._counted("CreateBucket", Answer())
        bucket = self._buckets.get(name)
        if bucket is None:
            raise S3Error(HTTPStatus.NOT_FOUND, "NoSuchBucket", name)
        operations = _OBJECT if key else _BUCKET
        for method, parameter, operation in operations:
            if request.method == method and (parameter is None or parameter in request.query):
                return self._counted(operation.__name__, operation(Call(bucket, name, key, request, content)))
        raise S3Error(HTTPStatus.NOT_IMPLEMENTED, "NotImplemented", f"{request.method} {request.path}")

    def _counted(self, name: str, answer: Answer) -> Answer:
        with self._guard:
            self.requests[name.strip("_")] += 1
        return answer


class Call(NamedTuple):
    """One request, and what it is about."""

    bucket: Bucket
    bucket_name: str
    key: str
    request: Received
    content: Part | None

    def received(self) -> Part:
        """Return the body, or refuse a request without one."""
        if self.content is None:
            raise S3Error(HTTPStatus.BAD_REQUEST, "MissingRequestBodyError")
        return self.content


def _put_object(call: Call) -> Answer:
    content = call.received()
    source = call.request.headers.get("x-amz-copy-source")
    if source:
        _, _, source_key = unquote(source).removeprefix("/").partition("/")
        blocks = call.bucket.get(source_key).blocks
    else:
        blocks = (content.block,)
    stored = StoredObject(
        blocks=blocks, etag=content.etag, headers=_kept(call.request), checksums=content.checksums
    )
    call.bucket.put(call.key, stored, _condition(call.request))
    if source:
        text = f"{_XML}<CopyObjectResult {_NAMESPACE}><ETag>{escape(stored.etag)}</ETag></CopyObjectResult>"
        return Answer(text=text)
    return Answer(headers={"etag": stored.etag, **content.checksums})


def _get_object(call: Call) -> Answer:
    found = call.bucket.get(call.key)
    wanted = call.request.headers.get("if-match")
    if wanted and wanted.strip('"') != found.etag.strip('"'):
        raise S3Error(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed", call.key)
    headers = {
        "etag": found.etag,
        "last-modified": found.modified_text,
        "accept-ranges": "bytes",
        **found.headers,
    }
    span = _span(call.request.headers.get("range"), found.size_bytes)
    if call.request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED" and span is None:
        headers.update(found.checksums)
    if span is None:
        return Answer(headers=headers, views=_held(found, 0, found.size_bytes), size_bytes=found.size_bytes)
    start, stop = span
    headers["content-range"] = f"bytes {start}-{stop - 1}/{found.size_bytes}"
    return Answer(
        HTTPStatus.PARTIAL_CONTENT,
        headers=headers,
        views=_held(found, start, stop),
        size_bytes=stop - start,
    )


def _held(found: StoredObject, start: int, stop: int) -> Iterable[memoryview]:
    """Yield the views; the generator holds the object, and so its memory, while they are being sent."""
    yield from found.views(start, stop)


def _delete_object(call: Call) -> Answer:
    call.bucket.delete(call.key)
    return Answer(HTTPStatus.NO_CONTENT)


def _delete_objects(call: Call) -> Answer:
    keys = [str(each.text) for each in _elements(call.received(), "Key")]
    for key in keys:
        call.bucket.delete(key)
    deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
    return Answer(text=f"{_XML}<DeleteResult {_NAMESPACE}>{deleted}</DeleteResult>")


def _create_upload(call: Call) -> Answer:
    upload_id = new_upload_id()
    call.bucket.uploads[upload_id] = Upload(key=call.key, headers=_kept(call.request))
    return Answer(text=_upload_text("InitiateMultipartUploadResult", call, upload_id))


def _upload_part(call: Call) -> Answer:
    content = call.received()
    upload = call.bucket.upload(call.request.query["uploadId"])
    upload.parts[int(call.request.query["partNumber"])] = content
    return Answer(headers={"etag": content.etag, **content.checksums})


def _complete_upload(call: Call) -> Answer:
    upload_id = call.request.query["uploadId"]
    named = [
        (int(str(part.findtext("{*}PartNumber"))), str(part.findtext("{*}ETag")))
        for part in _elements(call.received(), "Part")
    ]
    upload, parts = call.bucket.complete(upload_id, named)
    stored = StoredObject(
        blocks=tuple(part.block for part in parts),
        etag=new_etag(f"-{len(parts)}"),
        headers=upload.headers,
        checksums=_checksums(call.request.headers, {}),
    )
    call.bucket.put(upload.key, stored, _condition(call.request))
    call.bucket.uploads.pop(upload_id, None)
    etag = f"<ETag>{escape(stored.etag)}</ETag>"
    return Answer(text=_upload_text("CompleteMultipartUploadResult", call, upload_id, etag))


def _abort_upload(call: Call) -> Answer:
    call.bucket.upload(call.request.query["uploadId"])
    call.bucket.uploads.pop(call.request.query["uploadId"], None)
    return Answer(HTTPStatus.NO_CONTENT)


def _list_parts(call: Call) -> Answer:
    upload_id = call.request.query["uploadId"]
    after = int(call.request.query.get("part-number-marker", 0))
    count = int(call.request.query.get("max-parts", 1000))
    every = sorted(call.bucket.upload(upload_id).parts.items())
    parts = [(number, part) for number, part in every if number > after]
    rows = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(part.etag)}</ETag>"
        f"<Size>{part.block.size_bytes}</Size></Part>"
        for number, part in parts[:count]
    )
    cut = len(parts) > count
    tail = f"<IsTruncated>{str(cut).lower()}</IsTruncated>"
    if cut:
        tail += f"<NextPartNumberMarker>{parts[count - 1][0]}</NextPartNumberMarker>"
    return Answer(text=_upload_text("ListPartsResult", call, upload_id, tail + rows))


def _list_uploads(call: Call) -> Answer:
    prefix = call.request.query.get("prefix", "")
    rows = "".join(
        f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{upload_id}</UploadId>"
        "<Initiated>2020-01-01T00:00:00Z</Initiated></Upload>"
        for upload_id, upload in sorted(call.bucket.uploads.items())
        if upload.key.startswith(prefix)
    )
    name = f"<Bucket>{call.bucket_name}</Bucket><IsTruncated>false</IsTruncated>"
    text = f"{_XML}<ListMultipartUploadsResult {_NAMESPACE}>{name}{rows}</ListMultipartUploadsResult>"
    return Answer(text=text)


def _list_objects(call: Call) -> Answer:
    query = call.request.query
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    shown: Callable[[str], str] = quote if query.get("encoding-type") == "url" else escape
    after = query.get("continuation-token") or query.get("start-after") or query.get("marker") or ""
    most = int(query.get("max-keys", 1000))
    found: dict[str, StoredObject | None] = {}
    for key, each in call.bucket.items(prefix):
        rest, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        name = prefix + rest + cut if cut else key
        if name > after and not (cut and after.startswith(name)):
            found.setdefault(name, None if cut else each)
    page = dict(islice(found.items(), most))
    rows = "".join(_row(shown(key), each) for key, each in page.items())
    last = next(reversed(page), "")
    more = len(found) > len(page)
    tail = f"<IsTruncated>{str(more).lower()}</IsTruncated><KeyCount>{len(page)}</KeyCount>"
    if more:
        tail += f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
        tail += f"<NextMarker>{shown(last)}</NextMarker>"
    if shown is quote:
        tail += "<EncodingType>url</EncodingType>"
    head = f"<Name>{call.bucket_name}</Name><Prefix>{shown(prefix)}</Prefix><MaxKeys>{most}</MaxKeys>"
    return Answer(text=f"{_XML}<ListBucketResult {_NAMESPACE}>{head}{tail}{rows}</ListBucketResult>")


def _row(key: str, found: StoredObject | None) -> str:
    if found is None:
        return f"<CommonPrefixes><Prefix>{key}</Prefix></CommonPrefixes>"
    return (
        f"<Contents><Key>{key}</Key><LastModified>2020-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{escape(found.etag)}</ETag><Size>{found.size_bytes}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def _location(call: Call) -> Answer:
    del call
    return Answer(text=f"{_XML}<LocationConstraint {_NAMESPACE}>us-east-1</LocationConstraint>")


def _versioning(call: Call) -> Answer:
    del call
    return Answer(text=f"{_XML}<VersioningConfiguration {_NAMESPACE}/>")


def _head_bucket(call: Call) -> Answer:
    del call
    return Answer(headers={"x-amz-bucket-region": "us-east-1"})


_OBJECT: list[tuple[str, str | None, Callable[[Call], Answer]]] = [
    ("PUT", "uploadId", _upload_part),
    ("PUT", None, _put_object),
    ("GET", "uploadId", _list_parts),
    ("GET", None, _get_object),
    ("HEAD", None, _get_object),
    ("POST", "uploads", _create_upload),
    ("POST", "uploadId", _complete_upload),
    ("DELETE", "uploadId", _abort_upload),
    ("DELETE", None, _delete_object),
]
_BUCKET: list[tuple[str, str | None, Callable[[Call], Answer]]] = [
    ("HEAD", None, _head_bucket),
    ("GET", "location", _location),
    ("GET", "versioning", _versioning),
    ("GET", "uploads", _list_uploads),
    ("GET", None, _list_objects),
    ("POST", "delete", _delete_objects),
]


def _condition(request: Received) -> Callable[[StoredObject | None], bool]:
    """Return whether an object may take the place of the one that is there."""
    if request.headers.get("if-none-match") == "*":
        return lambda there: there is None
    wanted = request.headers.get("if-match")
    if wanted:
        return lambda there: there is not None and there.etag.strip('"') == wanted.strip('"')
    return lambda _: True


def _kept(request: Received) -> dict[str, str]:
    """Return the headers that a GET repeats."""
    return {
        name: value
        for name, value in request.headers.items()
        if name.startswith("x-amz-meta-") or (name in _KEPT and value != "aws-chunked")
    }


def _checksums(*sources: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for source in sources
        for name, value in source.items()
        if name.startswith(_CHECKSUM) and name not in {f"{_CHECKSUM}algorithm", f"{_CHECKSUM}mode"}
    }


def _verify(content: Part) -> None:
    view = content.block.view()
    for name, value in content.checksums.items():
        found = {
            "crc32": lambda: zlib.crc32(view).to_bytes(4, "big"),
            "sha256": lambda: hashlib.sha256(view).digest(),
        }.get(name.removeprefix(_CHECKSUM))
        if found is not None and base64.b64encode(found()).decode() != value:
            raise S3Error(HTTPStatus.BAD_REQUEST, "BadDigest", name)


def _span(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Return the range that is asked for; None for the whole."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        return max(size_bytes - int(last), 0), size_bytes
    stop = min(int(last) + 1, size_bytes) if last else size_bytes
    if int(first) >= stop:
        raise S3Error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange", str(header))
    return int(first), stop


def _elements(content: Part, name: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(bytes(content.block.view())).findall(f".//{{*}}{name}")


def _upload_text(kind: str, call: Call, upload_id: str, inner: str = "") -> str:
    return (
        f"{_XML}<{kind} {_NAMESPACE}><Bucket>{call.bucket_name}</Bucket><Key>{escape(call.key)}</Key>"
        f"<UploadId>{upload_id}</UploadId>{inner}</{kind}>"
    )
