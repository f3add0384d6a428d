"""Google Cloud Storage in memory, as far as gcsfs and obstore use it: its JSON API and its XML API.

`GcsService` is a WSGI application. It honours preconditions on generations as Google documents them: an
upload is refused in its last request, when the object would appear. Multipart uploads of the XML API have no
preconditions, and replace what is there.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from email.parser import BytesParser
from typing import Any, Final, TypeAlias, final
from urllib.parse import unquote
from xml.sax.saxutils import escape

from werkzeug import Request, Response

_CREATED: Final = "2026-01-01T00:00:00.000Z"
_MODIFIED: Final = "Thu, 01 Jan 2026 00:00:00 GMT"
_META: Final = "x-goog-meta-"


@final
class _RefusedError(Exception):
    """A request that the service does not do."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Object:
    content: bytes
    generation: int
    metadata: Mapping[str, str]
    etag: str
    md5: bytes | None


@final
@dataclass(kw_only=True, slots=True)
class _Upload:
    """One that is under way: resumable (`content` grows), or in parts."""

    bucket: str
    name: str
    metadata: Mapping[str, str]
    wanted: str | None = None
    content: bytes = b""
    parts: dict[int, bytes] = field(default_factory=dict)
    done: _Object | None = None


@final
class GcsService:
    """WSGI application; all requests are done one after another."""

    def __init__(self) -> None:
        self._buckets: dict[str, dict[str, _Object]] = {}
        self._uploads: dict[str, _Upload] = {}
        self._generations = itertools.count(1)
        self._guard = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        request = Request(environ)
        path = request.path
        request.get_data()
        with self._guard:
            for pattern, methods in _ROUTES:
                found = re.fullmatch(pattern, path)
                if found is None or request.method not in methods:
                    continue
                try:
                    answer = methods[request.method](self, request, *found.groups())
                except _RefusedError as refusal:
                    answer = _refusal(refusal, path)
                return answer(environ, start)
        return Response(f"{request.method} {path}: not served", 501)(environ, start)

    # What both APIs share

    def _bucket(self, bucket: str) -> dict[str, _Object]:
        if bucket not in self._buckets:
            raise _RefusedError(404, "NoSuchBucket")
        return self._buckets[bucket]

    def _object(self, bucket: str, name: str) -> _Object:
        found = self._bucket(bucket).get(name)
        if found is None:
            raise _RefusedError(404, "NoSuchKey")
        return found

    def _upload(self, upload_id: str) -> _Upload:
        if upload_id not in self._uploads:
            raise _RefusedError(404, "NoSuchUpload")
        return self._uploads[upload_id]

    def _demand(self, bucket: str, name: str, wanted: str | None) -> None:
        """Refuse the request if the object has another generation; 0 is that of none."""
        there = self._bucket(bucket).get(name)
        if wanted is not None and int(wanted) != (0 if there is None else there.generation):
            raise _RefusedError(412, "PreconditionFailed")

    def _put(
        self, bucket: str, name: str, content: bytes, metadata: Mapping[str, str], *, parts: int = 0
    ) -> _Object:
        md5 = hashlib.md5(content, usedforsecurity=False).digest()
        made = _Object(
            content=content,
            generation=next(self._generations),
            metadata=dict(metadata),
            etag=f'"{md5.hex()}{f"-{parts}" if parts else ""}"',
            md5=None if parts else md5,
        )
        self._bucket(bucket)[name] = made
        return made

    def _delete(self, bucket: str, name: str, wanted: str | None) -> Response:
        self._object(bucket, name)
        self._demand(bucket, name, wanted)
        del self._buckets[bucket][name]
        return Response(status=204)

    def _listed(
        self, bucket: str, args: Mapping[str, str], limit: int, after: str
    ) -> tuple[list[str], list[str], str]:
        """One page: the names, the prefixes, and where the next page begins."""
        prefix, delimiter = args.get("prefix", ""), args.get("delimiter", "")
        names: list[str] = []
        prefixes: dict[str, None] = {}
        for name in sorted(self._bucket(bucket)):
            if not name.startswith(prefix) or name <= after or any(map(name.startswith, prefixes)):
                continue
            if after.endswith(delimiter or "\0") and name.startswith(after):
                continue
            if len(names) + len(prefixes) == limit:
                return names, list(prefixes), max([*names, *prefixes])
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if cut:
                prefixes[prefix + head + cut] = None
            else:
                names.append(name)
        return names, list(prefixes), ""

    # The JSON API

    def make_bucket(self, request: Request) -> Response:
        name = json.loads(request.data)["name"]
        self._buckets.setdefault(name, {})
        return _json({"name": name})

    def delete_bucket(self, _request: Request, bucket: str) -> Response:
        self._bucket(bucket)
        del self._buckets[bucket]
        return Response(status=204)

    def show_bucket(self, _request: Request, bucket: str) -> Response:
        self._bucket(bucket)
        return _json({"name": bucket, "location": "US", "locationType": "region", "storageClass": "STANDARD"})

    def list_json(self, request: Request, bucket: str) -> Response:
        args = request.args.to_dict()
        after = args.get("pageToken", "")
        names, prefixes, rest = self._listed(bucket, args, int(args.get("maxResults", 1000)), after)
        items = [_resource(bucket, name, self._buckets[bucket][name]) for name in names]
        page = {"kind": "storage#objects", "items": items, "prefixes": prefixes, "nextPageToken": rest}
        return _json({key: value for key, value in page.items() if value})

    def get_json(self, request: Request, bucket: str, name: str) -> Response:
        found = self._object(bucket, name)
        if request.args.get("alt") == "media":
            return self.get_xml(request, bucket, name)
        return _json(_resource(bucket, name, found))

    def delete_json(self, request: Request, bucket: str, name: str) -> Response:
        return self._delete(bucket, name, request.args.get("ifGenerationMatch"))

    def insert(self, request: Request, bucket: str) -> Response:
        """An upload in one request, or the first or a later request of a resumable one."""
        if "upload_id" in request.args:
            return self.resume(request, bucket)
        wanted, kind = request.args.get("ifGenerationMatch"), request.args["uploadType"]
        if kind == "multipart":
            told, content = _related(request)
        else:
            resource = bool(request.data) and kind == "resumable"
            told, content = (json.loads(request.data) if resource else {}), request.data
        name, metadata = request.args.get("name") or told["name"], told.get("metadata", {})
        self._bucket(bucket)
        if kind == "resumable":
            upload_id = secrets.token_hex(16)
            self._uploads[upload_id] = _Upload(bucket=bucket, name=name, metadata=metadata, wanted=wanted)
            return Response(headers={"Location": f"{request.url}&upload_id={upload_id}"})
        self._demand(bucket, name, wanted)
        return _json(_resource(bucket, name, self._put(bucket, name, content, metadata)))

    def resume(self, request: Request, bucket: str) -> Response:
        """Take a chunk; bytes that are there already are not taken again."""
        upload = self._upload(request.args["upload_id"])
        chunk = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", request.headers.get("Content-Range", ""))
        if upload.done is None and chunk is not None:
            first, total = chunk.groups()
            if first is not None:
                if int(first) > len(upload.content):
                    raise _RefusedError(400, "the chunk leaves a gap")
                upload.content += request.data[len(upload.content) - int(first) :]
            if total == "*" or len(upload.content) < int(total):
                there = {"Range": f"bytes=0-{len(upload.content) - 1}"} if upload.content else {}
                return Response(status=308, headers=there)
            self._demand(bucket, upload.name, upload.wanted)
            upload.done = self._put(bucket, upload.name, upload.content, upload.metadata)
        if upload.done is None:
            raise _RefusedError(400, "a chunk needs Content-Range")
        return _json(_resource(bucket, upload.name, upload.done))

    def compose(self, request: Request, bucket: str, name: str) -> Response:
        told = json.loads(request.data)
        found = [self._object(bucket, source["name"]) for source in told["sourceObjects"]]
        if len(found) > 32:
            raise _RefusedError(400, "too many components")
        self._demand(bucket, name, request.args.get("ifGenerationMatch"))
        content, metadata = b"".join(each.content for each in found), told["destination"].get("metadata", {})
        return _json(_resource(bucket, name, self._put(bucket, name, content, metadata, parts=len(found))))

    def cancel(self, request: Request, _bucket: str) -> Response:
        self._upload(request.args["upload_id"])
        del self._uploads[request.args["upload_id"]]
        return Response(status=499)

    # The XML API

    def list_xml(self, request: Request, bucket: str) -> Response:
        if "uploads" in request.args:
            return self._list_uploads(bucket, request.args.get("prefix", ""))
        args = request.args.to_dict()
        after = args.get("continuation-token") or args.get("start-after", "")
        names, prefixes, rest = self._listed(bucket, args, int(args.get("max-keys", 1000)), after)
        objects = self._buckets[bucket]
        content = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(objects[name].content)}</Size>"
            f"<LastModified>{_CREATED}</LastModified><ETag>{escape(objects[name].etag)}</ETag></Contents>"
            for name in names
        )
        content += "".join(
            f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>" for prefix in prefixes
        )
        if rest:
            content += "<IsTruncated>true</IsTruncated>"
            content += f"<NextContinuationToken>{escape(rest)}</NextContinuationToken>"
        return _xml("ListBucketResult", content)

    def _list_uploads(self, bucket: str, prefix: str) -> Response:
        self._bucket(bucket)
        return _xml(
            "ListMultipartUploadsResult",
            "".join(
                f"<Upload><Key>{escape(upload.name)}</Key><UploadId>{upload_id}</UploadId></Upload>"
                for upload_id, upload in self._uploads.items()
                if upload.bucket == bucket and upload.name.startswith(prefix) and upload.done is None
            ),
        )

    def get_xml(self, request: Request, bucket: str, name: str) -> Response:
        found = self._object(bucket, name)
        headers = {
            "ETag": found.etag,
            "Last-Modified": _MODIFIED,
            "x-goog-generation": str(found.generation),
            **{_META + key: value for key, value in found.metadata.items()},
        }
        answer = Response(found.content, headers=headers, content_type="application/octet-stream")
        if request.range is None or request.method == "HEAD":
            return answer
        bounds = request.range.range_for_length(len(found.content))
        if bounds is None:
            raise _RefusedError(416, "InvalidRange")
        answer.status_code, answer.data = 206, found.content[slice(*bounds)]
        answer.headers["Content-Range"] = f"bytes {bounds[0]}-{bounds[1] - 1}/{len(found.content)}"
        return answer

    def put_xml(self, request: Request, bucket: str, name: str) -> Response:
        if "uploadId" in request.args:
            upload = self._upload(request.args["uploadId"])
            upload.parts[int(request.args["partNumber"])] = request.data
            return Response(headers={"ETag": f'"{hashlib.md5(request.data).hexdigest()}"'})
        content, metadata = request.data, _metadata(request)
        source = request.headers.get("x-goog-copy-source")
        if source is not None:
            found = self._object(*unquote(source).lstrip("/").split("/", 1))
            content, metadata = found.content, dict(found.metadata)
        self._demand(bucket, name, request.headers.get("x-goog-if-generation-match"))
        made = self._put(bucket, name, content, metadata)
        headers = {"ETag": made.etag, "x-goog-generation": str(made.generation)}
        if source is None:
            return Response(headers=headers)
        return _xml("CopyObjectResult", f"<ETag>{made.etag}</ETag>", headers)

    def post_xml(self, request: Request, bucket: str, name: str) -> Response:
        """Begin an upload in parts, or complete it, whatever is there."""
        self._bucket(bucket)
        if "uploads" in request.args:
            upload_id = secrets.token_hex(16)
            self._uploads[upload_id] = _Upload(bucket=bucket, name=name, metadata=_metadata(request))
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload_id}</UploadId>")
        upload = self._upload(request.args["uploadId"])
        numbers = [int(found) for found in re.findall(rb"<PartNumber>(\d+)</PartNumber>", request.data)]
        content = b"".join(upload.parts[number] for number in numbers)
        made = self._put(bucket, name, content, upload.metadata, parts=len(numbers))
        del self._uploads[request.args["uploadId"]]
        headers = {"x-goog-generation": str(made.generation)}
        return _xml("CompleteMultipartUploadResult", f"<ETag>{escape(made.etag)}</ETag>", headers)

    def delete_xml(self, request: Request, bucket: str, name: str) -> Response:
        if "uploadId" in request.args:
            self._upload(request.args["uploadId"])
            del self._uploads[request.args["uploadId"]]
            return Response(status=204)
        return self._delete(bucket, name, request.headers.get("x-goog-if-generation-match"))


_Handler: TypeAlias = Callable[..., Response]
_ROUTES: Final[list[tuple[str, dict[str, _Handler]]]] = [
    ("/storage/v1/b", {"POST": GcsService.make_bucket}),
    ("/storage/v1/b/([^/]+)", {"GET": GcsService.show_bucket, "DELETE": GcsService.delete_bucket}),
    ("/storage/v1/b/([^/]+)/o", {"GET": GcsService.list_json}),
    ("/storage/v1/b/([^/]+)/o/(.+)/compose", {"POST": GcsService.compose}),
    (
        "/(?:download/)?storage/v1/b/([^/]+)/o/(.+)",
        {"GET": GcsService.get_json, "DELETE": GcsService.delete_json},
    ),
    (
        "/upload/storage/v1/b/([^/]+)/o",
        {"POST": GcsService.insert, "PUT": GcsService.resume, "DELETE": GcsService.cancel},
    ),
    ("/([^/]+)/?", {"GET": GcsService.list_xml}),
    (
        "/([^/]+)/(.+)",
        {
            "GET": GcsService.get_xml,
            "HEAD": GcsService.get_xml,
            "PUT": GcsService.put_xml,
            "POST": GcsService.post_xml,
            "DELETE": GcsService.delete_xml,
        },
    ),
]


def is_json(path: str) -> bool:
    """Return whether a path belongs to the JSON API."""
    return re.match("/((upload|download)/)?storage/v1/", path) is not None


def _json(answer: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(answer), status, content_type="application/json")


def _xml(kind: str, content: str, headers: Mapping[str, str] | None = None) -> Response:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{kind}>{content}</{kind}>'
    return Response(text, headers=dict(headers or {}), content_type="application/xml")


def _refusal(refusal: _RefusedError, path: str) -> Response:
    if is_json(path):
        return _json({"error": {"code": refusal.status, "message": refusal.reason}}, refusal.status)
    answer = _xml("Error", f"<Code>{refusal.reason}</Code><Message>{refusal.reason}</Message>")
    answer.status_code = refusal.status
    return answer


def _resource(bucket: str, name: str, found: _Object) -> dict[str, Any]:
    md5 = {} if found.md5 is None else {"md5Hash": base64.b64encode(found.md5).decode()}
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(found.content)),
        "generation": str(found.generation),
        "metadata": dict(found.metadata),
        "contentType": "application/octet-stream",
        "timeCreated": _CREATED,
        "updated": _CREATED,
        "etag": found.etag,
        **md5,
    }


def _metadata(request: Request) -> dict[str, str]:
    headers = {key.lower(): value for key, value in request.headers.items()}
    return {key.removeprefix(_META): value for key, value in headers.items() if key.startswith(_META)}


def _related(request: Request) -> tuple[dict[str, Any], bytes]:
    """The resource and the content of an upload in one request."""
    head = f"Content-Type: {request.headers['Content-Type']}\r\n\r\n".encode()
    boundary = BytesParser().parsebytes(head, headersonly=True).get_param("boundary")
    assert isinstance(boundary, str)
    line = f"--{boundary}".encode()
    _, told, rest = request.data.split(line, 2)
    told = re.split(rb"\r?\n\r?\n", told, maxsplit=1)[1]
    content = re.split(rb"\r?\n\r?\n", rest.rpartition(line)[0], maxsplit=1)[1]
    return json.loads(told), re.sub(rb"\r?\n\Z", b"", content)
