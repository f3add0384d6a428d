"""Samples for pytest: a part of `python -m tests.reliability`, in a warm process that may fork."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.reliability.outcome import Outcome
from tests.scripts import run_python

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
    command: list[str | Path] = ["-m", "tests.reliability", "--only", parts, "--seed", str(seed)]
    command += ["--root", folder, "--json", out]
    command += [] if count is None else ["--count", str(count)]
    command += [word for case in cases for word in ("--case", case)]
    done = run_python(*command, cwd=ROOT, timeout=230)
    output = f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert out.exists(), output
    return json.loads(out.read_text()), output
