"""Samples for pytest: a part of `python -m tests.reliability`, in a process that may fork."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.reliability.outcome import Outcome

ROOT = Path(__file__).parents[2]
SEED = 20261121


def sample(folder: Path, parts: str, **options: Any) -> list[Outcome]:
    """Outcomes of some parts, none of which found a problem; options as of `attempt`."""
    found, output = attempt(folder, parts, **options)
    assert found["problems"] == [], output
    assert [part["failure"] for part in found["parts"] if part["failure"]] == [], output
    return [Outcome(**fields) for fields in found["outcomes"]]


def attempt(
    folder: Path, parts: str, *, count: int | None = None, cases: Sequence[str] = (), seed: int = SEED
) -> tuple[dict[str, Any], str]:
    """What the command writes as JSON, whatever it found, and what it prints."""
    out = folder / "out.json"
    command = [sys.executable, "-m", "tests.reliability", "--only", parts, "--seed", str(seed)]
    command += ["--root", str(folder), "--json", str(out)]
    command += [] if count is None else ["--count", str(count)]
    command += [word for case in cases for word in ("--case", case)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230, check=False)
    output = f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert out.exists(), output
    return json.loads(out.read_text()), output
