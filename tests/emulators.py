"""S3 and GCS on loopback, each in a process of its own that ends with the tests, however they end.

`python tests/emulators.py s3` starts one, prints its port and serves until its standard input closes. In
front of S3 stands a `FaultyService`, which does nothing until a `ServiceControl` tells it to.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


@contextmanager
def emulator(kind: str) -> Generator[str]:
    """The endpoint URL of a fresh emulator (`s3` or `gcs`)."""
    with subprocess.Popen(
        [sys.executable, __file__, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the {kind} emulator did not start (exit code {process.wait()})")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def forget_memory() -> None:
    """Empty the one table that fsspec has for all `memory://` roots, and that each listing walks."""
    if (memory := sys.modules.get("fsspec.implementations.memory")) is not None:
        memory.MemoryFileSystem.store.clear()
        memory.MemoryFileSystem.pseudo_dirs[:] = [""]


def _serve_s3() -> int:
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    from ckpt_core.testing import FaultyService

    application = FaultyService(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def _serve_gcs() -> int:
    from gcp_storage_emulator.handlers import objects
    from gcp_storage_emulator.server import HANDLERS, create_server

    # The emulator cannot cancel a resumable upload, which Google's service can.
    for _, methods in HANDLERS:
        if methods.get("POST") is objects.insert:
            methods["DELETE"] = _cancel_upload
    server = create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    return server._api._httpd.server_address[1]


def _cancel_upload(request: Any, response: Any, storage: Any) -> None:
    storage.delete_resumable_file_obj(request.query["upload_id"][0])
    response.status = SimpleNamespace(value=499, phrase="Client Closed Request")


if __name__ == "__main__":
    print({"s3": _serve_s3, "gcs": _serve_gcs}[sys.argv[1]](), flush=True)
    sys.stdin.read()
    # The servers' threads would keep the process alive.
    sys.stdout.close()
    os._exit(0)
