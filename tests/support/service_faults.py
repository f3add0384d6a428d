"""An object store that fails where a test wants it to: faults between a real client and a real server.

`FaultyService` wraps the WSGI application of an emulator and runs inside its process. Every request has a
number, counted from 0; a test sets the faults and reads the log from outside, with `ServiceControl`.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import Any, Final, Literal, TypeAlias, final
from urllib.parse import unquote_plus

Action: TypeAlias = Literal[
    "error", "hang", "drop", "lose", "truncate", "hide", "stale", "kill", "kill_after"
]
Start: TypeAlias = Callable[..., Any]
Application: TypeAlias = Callable[[dict[str, Any], Start], Iterable[bytes]]

_CONTROL: Final = "/_faults"
# S3: the access key; GCS: the token; Azure: the account.
_CREDENTIAL = re.compile(r"(?:Credential=|Bearer |SharedKey )([^/,:\s]+)")
_LISTED = re.compile(rb"<(Contents|CommonPrefixes|Blob|BlobPrefix)>.*?</\1>", re.DOTALL)
_NAME = re.compile(rb"<(Key|Prefix|Name)>(.*?)</\1>", re.DOTALL)
_LISTING = re.compile(r"/storage/v1/b/[^/]+/o(\?.*)?|.*[?&](list-type=2|comp=list)(&.*)?", re.DOTALL)

REFUSALS: Final = {
    "s3": {
        "AccessDenied": (403, "AccessDenied"),
        "ExpiredToken": (400, "ExpiredToken"),
        "InternalError": (500, "InternalError"),
        "ServiceUnavailable": (503, "ServiceUnavailable"),
        "SlowDown": (503, "SlowDown"),
    },
    "gcs": {
        "AccessDenied": (403, "AccessDenied"),
        "ExpiredToken": (401, "AuthenticationRequired"),
        "InternalError": (500, "InternalError"),
        "ServiceUnavailable": (503, "ServiceUnavailable"),
        "SlowDown": (429, "SlowDown"),
    },
    "azure": {
        "AccessDenied": (403, "AuthorizationPermissionMismatch"),
        "ExpiredToken": (401, "InvalidAuthenticationInfo"),
        "InternalError": (500, "InternalError"),
        "ServiceUnavailable": (503, "ServerBusy"),
        "SlowDown": (503, "ServerBusy"),
    },
}
"""How each service answers a `ServiceFault` with a code of S3: its status and its own code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceFault:
    """What happens to which requests.

    Attributes:
        method: pattern of the HTTP method (`fnmatch`, like all patterns here).
        target: pattern of path and query together, both decoded: `/bucket/run/*`, `*?*uploadId=*`.
        who: pattern of the access key that signed the request; each rank may have its own.
        nth: the first of the matching requests that it happens to, counted from 0.
        count: to how many from there on; None for all.
        action: `error`, answered instead of the request; `hang`, the request is done only when it is
            released, whether or not anybody still waits; `drop`, the connection ends and the request is not
            done; `lose`, it is done, and the connection ends; `truncate`, the connection ends in the middle
            of the answer; `hide`, a listing leaves out what matches `hidden`; `stale`, a listing is answered
            as it was before request `as_of`; `kill` and `kill_after`, the processes `pids` get SIGKILL, and
            the request is not done, or is done.
        code: of the `error`, one of those that S3 knows; see `REFUSALS` for the other services.
        hidden: pattern of the keys that are hidden.
        as_of: request number.
        pids: processes to kill.
    """

    action: Action
    method: str = "*"
    target: str = "*"
    who: str = "*"
    nth: int = 0
    count: int | None = None
    code: str = "InternalError"
    hidden: str = "*"
    as_of: int = 0
    pids: Sequence[int] = ()

    def matches(self, method: str, target: str, who: str) -> bool:
        """Whether the patterns fit, whichever the nth."""
        pairs = ((method, self.method), (target, self.target), (who, self.who))
        return all(fnmatchcase(value, pattern) for value, pattern in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceRequest:
    """One request that reached the service; `faults` are the actions that it met."""

    number: int
    method: str
    target: str
    who: str
    faults: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    status: str
    headers: Sequence[tuple[str, str]]
    body: bytes


@final
class FaultyService:
    """WSGI middleware: passes everything on to an application, except for the faults; keeps a log.

    Connections can be dropped where the server gives its socket to the application, as werkzeug does.
    Concurrency: as many threads as the server has.

    Args:
        application: the service.
        kind: which service it is: `s3`, `gcs` or `azure`.
    """

    def __init__(self, application: Application, kind: str = "s3") -> None:
        self._application = application
        self._refusals = REFUSALS[kind]
        self._guard = threading.Lock()
        self._faults: list[ServiceFault] = []
        self._seen: list[int] = []
        self._log: list[ServiceRequest] = []
        self._listings: list[tuple[int, str, _Answer]] = []
        self._released = threading.Event()

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        """Answer one request."""
        if environ["PATH_INFO"].startswith(_CONTROL):
            return _respond(self._control(environ), start)
        _read_body(environ)
        request, due, released = self._register(environ)
        for fault in due:
            match fault.action:
                case "error":
                    return _respond(_refusal(*self._refusals[fault.code], request), start)
                case "hang":
                    released.wait()
                case "drop" | "kill":
                    return _cut(environ, fault.pids)
                case _:
                    pass  # these faults are in the answer
        return self._answer(request, due, environ, start)

    def _answer(
        self, request: ServiceRequest, due: Sequence[ServiceFault], environ: dict[str, Any], start: Start
    ) -> Iterable[bytes]:
        answer = self._perform(environ, request)
        for fault in due:
            if fault.action in {"lose", "kill_after"}:
                return _cut(environ, fault.pids)
            if fault.action == "truncate":
                return _half(answer, environ, start)
            answer = self._distorted(answer, fault, request)
        return _respond(answer, start)

    def _register(
        self, environ: dict[str, Any]
    ) -> tuple[ServiceRequest, list[ServiceFault], threading.Event]:
        method, target, who = environ["REQUEST_METHOD"], _target(environ), _who(environ)
        with self._guard:
            due: list[ServiceFault] = []
            for index, fault in enumerate(self._faults):
                if not fault.matches(method, target, who):
                    continue
                place = self._seen[index] - fault.nth
                self._seen[index] += 1
                if place >= 0 and (fault.count is None or place < fault.count):
                    due.append(fault)
            actions = [fault.action for fault in due]
            request = ServiceRequest(
                number=len(self._log), method=method, target=target, who=who, faults=actions
            )
            self._log.append(request)
            return request, due, self._released

    def _perform(self, environ: dict[str, Any], request: ServiceRequest) -> _Answer:
        told: list[tuple[str, Sequence[tuple[str, str]]]] = []
        content = self._application(environ, lambda status, headers, *_error: told.append((status, headers)))
        body = b"".join(content)
        answer = _Answer(status=told[-1][0], headers=told[-1][1], body=body)
        if _is_listing(request):
            with self._guard:
                self._listings.append((request.number, request.target, answer))
        return answer

    def _distorted(self, answer: _Answer, fault: ServiceFault, request: ServiceRequest) -> _Answer:
        if not _is_listing(request):
            return answer
        if fault.action == "hide":
            return _without(answer, fault.hidden)
        if fault.action == "stale":
            with self._guard:
                earlier = [
                    listing
                    for number, target, listing in self._listings
                    if number < fault.as_of and target == request.target
                ]
            return earlier[-1] if earlier else answer
        return answer

    def _control(self, environ: dict[str, Any]) -> _Answer:
        body = _read_body(environ)
        with self._guard:
            match environ["REQUEST_METHOD"], environ["PATH_INFO"].removeprefix(_CONTROL):
                case "PUT", "/rules":
                    self._faults = [ServiceFault(**fault) for fault in json.loads(body)]
                    self._seen = [0] * len(self._faults)
                case "POST", "/release":
                    self._released.set()
                    self._released = threading.Event()
                case "GET", "/log":
                    since = int(environ["QUERY_STRING"])
                    content = json.dumps([asdict(request) for request in self._log[since:]]).encode()
                    return _Answer(status="200 OK", headers=_headers(content), body=content)
                case _:
                    return _Answer(status="404 Not Found", headers=_headers(b""), body=b"")
        return _Answer(status="200 OK", headers=_headers(b"{}"), body=b"{}")


@final
class ServiceControl:
    """Sets the faults of a `FaultyService` and reads its log, from any process.

    Args:
        endpoint: URL of the service.
    """

    def __init__(self, endpoint: str) -> None:
        self._url = endpoint.rstrip("/") + _CONTROL

    def set(self, *faults: ServiceFault) -> None:
        """These faults, and no others, from the next request on; their counts begin at 0."""
        self._ask("PUT", "/rules", json.dumps([asdict(fault) for fault in faults]).encode())

    def clear(self) -> None:
        """No faults from now on; what hangs goes on hanging until `release`."""
        self.set()

    def release(self) -> None:
        """Do the requests that hang now; those that come later hang as before."""
        self._ask("POST", "/release", b"")

    def log(self, since: int = 0) -> list[ServiceRequest]:
        """The requests so far, from number `since` on."""
        found = json.loads(self._ask("GET", f"/log?{since}", None))
        return [ServiceRequest(**told) for told in found]

    def _ask(self, method: str, path: str, body: bytes | None) -> bytes:
        request = urllib.request.Request(self._url + path, data=body, method=method)
        # No proxy: the emulator is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            content: bytes = answer.read()
        return content


def _target(environ: dict[str, Any]) -> str:
    query = unquote_plus(environ.get("QUERY_STRING", ""))
    return f"{environ['PATH_INFO']}?{query}" if query else str(environ["PATH_INFO"])


def _is_listing(request: ServiceRequest) -> bool:
    return request.method == "GET" and _LISTING.fullmatch(request.target) is not None


def _who(environ: dict[str, Any]) -> str:
    found = _CREDENTIAL.match(environ.get("HTTP_AUTHORIZATION", "").removeprefix("AWS4-HMAC-SHA256 "))
    return "" if found is None else found[1]


def _read_body(environ: dict[str, Any]) -> bytes:
    """The body, read before anything else: a request that arrived whole can be done without its sender."""
    length = environ.get("CONTENT_LENGTH")
    if not length:
        return b""
    body: bytes = environ["wsgi.input"].read(int(length))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _refusal(status: int, code: str, request: ServiceRequest) -> _Answer:
    message = f"{code} on request {request.number}, on purpose"
    if request.target.startswith(("/storage/v1/", "/upload/storage/v1/", "/download/storage/v1/")):
        kind, text = "application/json", json.dumps({"error": {"code": status, "message": message}})
    else:
        kind = "application/xml"
        text = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        )
    body = b"" if request.method == "HEAD" else text.encode()
    headers = [*_headers(body, kind), ("x-ms-error-code", code)]
    return _Answer(status=f"{status} {HTTPStatus(status).phrase}", headers=headers, body=body)


def _headers(body: bytes, kind: str = "application/json") -> list[tuple[str, str]]:
    return [("Content-Type", kind), ("Content-Length", str(len(body)))]


def _respond(answer: _Answer, start: Start) -> Iterable[bytes]:
    start(answer.status, list(answer.headers))
    return [answer.body]


def _half(answer: _Answer, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
    start(answer.status, list(answer.headers))
    yield answer.body[: len(answer.body) // 2]
    _disconnect(environ)


def _cut(environ: dict[str, Any], pids: Sequence[int]) -> Iterable[bytes]:
    for pid in pids:
        # It may have been killed already, by a request that another of its threads had sent.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _disconnect(environ)
    raise ConnectionAbortedError("the connection was cut, on purpose")


def _disconnect(environ: dict[str, Any]) -> None:
    connection: socket.socket = environ["werkzeug.socket"]
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _without(answer: _Answer, hidden: str) -> _Answer:
    def keep(entry: re.Match[bytes]) -> bytes:
        name = _NAME.search(entry[0])
        return b"" if name is not None and fnmatchcase(name[2].decode(), hidden) else entry[0]

    if answer.body.startswith(b"{"):
        page = json.loads(answer.body)
        page["items"] = [item for item in page.get("items", []) if not fnmatchcase(item["name"], hidden)]
        page["prefixes"] = [name for name in page.get("prefixes", []) if not fnmatchcase(name, hidden)]
        body = json.dumps(page).encode()
    else:
        body = _LISTED.sub(keep, answer.body)
    others = [(name, value) for name, value in answer.headers if name.lower() != "content-length"]
    return _Answer(status=answer.status, headers=[*others, ("Content-Length", str(len(body)))], body=body)
