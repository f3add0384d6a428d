"""A Hugging Face Hub of this process: what `huggingface_hub` asks of it for the files of a repository.

The client is the real one; the service keeps files in memory, and every commit. Large files are not asked for
by LFS or Xet: that is between the client and the real Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """One repository, `user/repo`.

    Attributes:
        url: of the service.
        files: path -> content, as of now.
        commits: what each commit has changed: paths, a deleted one with a minus.
    """

    def __init__(self) -> None:
        self.url = ""
        self.files: dict[str, bytes] = {}
        self.commits: list[list[str]] = []
        self.guard = threading.Lock()

    def commit(self, lines: list[dict[str, Any]]) -> tuple[int, str]:
        """Commit; return status and error code: 412 if another commit is under way, as of the real Hub."""
        changes = [(line["key"], line["value"]) for line in lines if line["key"] != "header"]
        if not self.guard.acquire(blocking=False):
            return 412, ""
        try:
            threading.Event().wait(0.005)
            if any(key == "deletedFile" and value["path"] not in self.files for key, value in changes):
                return 404, "EntryNotFound"
            for key, value in changes:
                if key == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                else:
                    del self.files[value["path"]]
            self.commits.append([("-" if key != "file" else "") + value["path"] for key, value in changes])
        finally:
            self.guard.release()
        return 200, ""

    def entry(self, path: str) -> dict[str, Any] | None:
        if path in self.files:
            oid = hashlib.sha1(self.files[path], usedforsecurity=False).hexdigest()
            return {"type": "file", "path": path, "size": len(self.files[path]), "oid": oid}
        if any(each.startswith(f"{path}/") for each in self.files):
            return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
        return None

    def tree(self, below: str, *, recursive: bool) -> list[dict[str, Any]]:
        prefix, found = f"{below}/" if below else "", set[str]()
        for path in self.files:
            if path.startswith(prefix):
                parts = path[len(prefix) :].split("/")
                found.update(
                    prefix + "/".join(parts[:end]) for end in range(1, len(parts) + 1 if recursive else 2)
                )
        return [entry for path in sorted(found) if (entry := self.entry(path))]


@contextmanager
def running_hub() -> Generator[Hub]:
    """Serve a repository until the end of the block."""
    hub = Hub()

    class Service(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def tell(self, value: object, status: int = 200, **headers: str) -> None:
            self.answer(json.dumps(value).encode(), status, Content_Type="application/json", **headers)

        def refuse(self, code: str) -> None:
            self.tell({}, 404, X_Error_Code=code)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            place = urlsplit(self.path)
            path = unquote(place.path)
            api, content = "/api/models/user/repo", "/user/repo/resolve/main/"
            if path in {api, f"{api}/revision/main"}:
                self.tell({"id": "user/repo", "sha": "1" * 40, "siblings": []})
            elif path.startswith(f"{api}/tree/main"):
                below = path[len(f"{api}/tree/main") :].strip("/")
                if below and (hub.entry(below) or {}).get("type") != "directory":
                    self.refuse("EntryNotFound")
                else:
                    self.tell(hub.tree(below, recursive="recursive=true" in place.query.lower()))
            elif path.startswith(content) and path[len(content) :] in hub.files:
                found = hub.files[path[len(content) :]]
                begin, end = 0, len(found)
                if wanted := self.headers.get("Range"):
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    begin, end = int(first), min(end, int(last or end) + 1)
                headers = {"ETag": '"x"', "X_Repo_Commit": "1" * 40}
                if wanted:
                    headers["Content_Range"] = f"bytes {begin}-{end - 1}/{len(found)}"
                self.answer(found[begin:end], 206 if wanted else 200, **headers)
            else:
                known = path.startswith((api, "/user/repo"))
                self.refuse("EntryNotFound" if known else "RepoNotFound")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.endswith("/preupload/main"):
                asked = json.loads(body)["files"]
                said = {"uploadMode": "regular", "shouldIgnore": False}
                self.tell({"files": [{"path": each["path"], **said} for each in asked]})
            elif self.path.split("?")[0].endswith("/commit/main"):
                status, code = hub.commit([json.loads(line) for line in body.splitlines()])
                url = f"{hub.url}/user/repo/commit/{'1' * 40}"
                said = {"commitUrl": url, "commitOid": "1" * 40, "success": True} if status == 200 else {}
                self.tell(said, status, **({"X_Error_Code": code} if code else {}))
            elif self.path.endswith("/paths-info/main"):
                paths = json.loads(body)["paths"]
                self.tell([entry for path in paths if (entry := hub.entry(path))])
            else:
                self.refuse("RepoNotFound")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
