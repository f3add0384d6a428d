"""S3, GCS and Azure on loopback, each in a process of its own that ends with the tests, however they end.

`python -m tests.support.emulators s3` starts one, prints its port and serves until its standard input closes.
S3 is `moto`; Azure is Azurite, a program for node that `make setup` installs where there is npm; GCS is our
own, because no emulator for Python honours preconditions. In front of each stands a `FaultyService`, which
does nothing until a `ServiceControl` tells it to.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

AZURITE: Final = Path(sys.prefix, "azurite", "node_modules", ".bin", "azurite-blob")
"""Where `make setup` installs it."""

AZURE_ACCOUNT: Final = "devstoreaccount1"
AZURE_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every Azurite, and no secret: Microsoft documents it."""

_AZURITE_OPTIONS: Final = ("--disableTelemetry", "--skipApiVersionCheck")
_HOP: Final = {"connection", "keep-alive", "transfer-encoding"}


def missing_for(kind: str) -> str:
    """What this machine lacks for an emulator, with advice; "" if nothing."""
    if kind != "azure":
        return ""
    if shutil.which("node") is None:
        return "Azurite, the emulator of Azure, needs node; install it and run `make setup` again"
    return "" if AZURITE.exists() else f"no {AZURITE}; install npm and run `make setup` again"


@contextmanager
def emulator(kind: str) -> Generator[str]:
    """The endpoint URL of a fresh emulator (`s3`, `gcs` or `azure`)."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.emulators", kind],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the {kind} emulator did not start (exit code {process.wait()})")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def forget_memory() -> None:
    """Empty the one table that fsspec has for all `memory://` roots, and that each listing walks."""
    if (memory := sys.modules.get("fsspec.implementations.memory")) is not None:
        memory.MemoryFileSystem.store.clear()
        memory.MemoryFileSystem.pseudo_dirs[:] = [""]


def _application(kind: str) -> Any:
    if kind == "gcs":
        from tests.support.gcs_service import GcsService

        return GcsService()
    if kind == "azure":
        return _Azurite()
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    return DomainDispatcherApplication(create_backend_app)


class _Azurite:
    """WSGI application: passes each request on to a process of node, unchanged, for it is signed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [
                AZURITE,
                *["--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"],
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        told = next(line for line in self._process.stdout if "successfully listens" in line)
        self._port = int(told.rstrip().rpartition(":")[2])
        threading.Thread(target=self._process.stdout.read, daemon=True).start()

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.putrequest(
                environ["REQUEST_METHOD"], environ["RAW_URI"], skip_host=True, skip_accept_encoding=True
            )
            for name, value in environ["raw_headers"]:
                if name.lower() not in _HOP:
                    connection.putheader(name, value)
            connection.endheaders(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
            answer = connection.getresponse()
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP]
            start(f"{answer.status} {answer.reason}", headers)
            return [answer.read()]
        finally:
            connection.close()

    def close(self) -> None:
        self._process.kill()


def _serve(kind: str, application: Any) -> int:
    from werkzeug.serving import WSGIRequestHandler, make_server

    from tests.support.service_faults import FaultyService

    class Handler(WSGIRequestHandler):
        def log(self, *_arguments: Any) -> None:
            pass

        def make_environ(self) -> dict[str, Any]:
            # WSGI drops the headers with underscores, which Azure's metadata may have.
            return {**super().make_environ(), "raw_headers": self.headers.items()}

    served = FaultyService(application, kind)
    server = make_server("127.0.0.1", 0, served, threaded=True, request_handler=Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def _main(kind: str) -> None:
    application = _application(kind)
    print(_serve(kind, application), flush=True)
    sys.stdin.read()
    if isinstance(application, _Azurite):
        application.close()
    # The servers' threads would keep the process alive.
    sys.stdout.close()
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1])
