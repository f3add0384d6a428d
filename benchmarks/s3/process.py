"""Start the server in a process of its own, and ask it what it has served."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

BUCKET = "bench"
COUNTERS_PATH = "/_counters"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running server."""

    url: str
    bucket: str = BUCKET

    @property
    def environment(self) -> dict[str, str]:
        """Variables from which the clients of AWS learn where it is, and credentials that it accepts."""
        return {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "S3_ENDPOINT_URL": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def storage_options(self) -> dict[str, Any]:
        """The same for `storage_options`."""
        return {"endpoint_url": self.url, "key": "bench", "secret": "bench-secret"}

    def counters(self) -> dict[str, Any]:
        """Ask for requests by operation, bytes in both directions, and CPU seconds, since the start."""
        with urllib.request.urlopen(self.url + COUNTERS_PATH) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def serving(*, verifies: bool = False, gives_way: bool = False) -> Generator[Server]:
    """Run a server in a process of its own; it ends with the context, or with this process.

    `gives_way`: it takes only time of the processors that nothing else wants, so that it disturbs a training
    on this machine hardly more than one elsewhere would.
    """
    command = ["nice", "-n", "19"] if gives_way else []
    command += [sys.executable, "-m", "benchmarks.s3.server", "--bucket", BUCKET, "--until-eof"]
    if verifies:
        command.append("--verify")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError("the S3 server did not start")
            yield Server(url=url)
        finally:
            process.stdin.close()
