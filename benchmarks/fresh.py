"""Work in a process of its own: what is measured there has no past."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def in_fresh_process(
    module: str, order: Mapping[str, Any], outcome: Path, *, timeout_seconds: float, first_path: str = ""
) -> dict[str, Any] | str:
    """Run `python -m module ORDER OUTCOME`, which writes JSON to `outcome`.

    What lies below `first_path` is imported from there.

    Returns:
        What it wrote; or why there is nothing, which may also stand in the file as "not_run".
    """
    outcome.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, json.dumps(order), str(outcome)]
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
            env={**os.environ, **({"PYTHONPATH": first_path} if first_path else {})},
        )
    except subprocess.TimeoutExpired:
        return f"killed after {timeout_seconds:g} s"
    if not outcome.exists():
        last = ran.stderr.strip().splitlines()[-1:] or [f"exit code {ran.returncode}"]
        return last[0][:160]
    read: dict[str, Any] = json.loads(outcome.read_text())
    return str(read["not_run"]) if "not_run" in read else read
