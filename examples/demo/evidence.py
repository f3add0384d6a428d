"""Read back the records of the ranks and the driver, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.plan import KILLED, RESHARDED, RESUMED, UNINTERRUPTED

KILL_FILE = "kill.json"
STATE_FILE = "state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """The state of the checkpoint root after the kill.

    Attributes:
        time: when, Unix seconds.
        torn: names of the directories of saves that will never be committed.
        torn_bytes: their bytes on disk.
        committed: the steps that a resume may choose from.
    """

    time: float
    torn: Sequence[str]
    torn_bytes: int
    committed: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """One step of one rank; `bits` is the exact value, as `float.hex` writes it."""

    step: int
    bits: str
    time: float

    @property
    def value(self) -> float:
        return float.fromhex(self.bits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One telemetry span of one rank; `end` is None if the process died in it."""

    name: str
    rank: int
    start: float
    end: float | None
    step: int | None
    size_bytes: int

    @property
    def seconds(self) -> float:
        return 0.0 if self.end is None else self.end - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseEvidence:
    """The records of one phase: losses and spans by rank, state digests, logs."""

    losses: Mapping[int, Sequence[Loss]]
    spans: Sequence[Span]
    state: Mapping[str, str]
    log: str

    @property
    def steps(self) -> range:
        """Return the steps that all ranks have recorded."""
        if not self.losses or not all(self.losses.values()):
            return range(0)
        first = max(losses[0].step for losses in self.losses.values())
        return range(first, min(losses[-1].step for losses in self.losses.values()) + 1)

    def finished(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name and span.end is not None]

    def mean_losses(self) -> list[tuple[int, float]]:
        """Return the mean over the ranks for each step."""
        by_step: dict[int, list[float]] = {}
        for losses in self.losses.values():
            for loss in losses:
                by_step.setdefault(loss.step, []).append(loss.value)
        return [(step, sum(values) / len(values)) for step, values in sorted(by_step.items())]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All phases of one framework; `still_torn` is left over after the resumed run."""

    framework: str
    uninterrupted: PhaseEvidence
    killed: PhaseEvidence
    resumed: PhaseEvidence
    resharded: PhaseEvidence
    kill: Kill
    still_torn: Sequence[str]

    def phase(self, name: str) -> PhaseEvidence:
        found: PhaseEvidence = getattr(self, name)
        return found


def read_evidence(folder: Path) -> Evidence:
    """Read the folder of one framework."""
    return Evidence(
        framework=folder.name,
        uninterrupted=_read_phase(folder / UNINTERRUPTED),
        killed=_read_phase(folder / KILLED),
        resumed=_read_phase(folder / RESUMED),
        resharded=_read_phase(folder / RESHARDED),
        kill=Kill(**json.loads((folder / KILL_FILE).read_text())),
        still_torn=sorted(path.name for path in (folder / "checkpoints").glob(".incomplete-*")),
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file that may be cut off or still being written."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _read_phase(folder: Path) -> PhaseEvidence:
    state = folder / STATE_FILE
    return PhaseEvidence(
        losses={_rank(path): _read_losses(path) for path in sorted(folder.glob("losses-*.jsonl"))},
        spans=[span for path in sorted(folder.glob("telemetry-*.jsonl")) for span in _read_spans(path)],
        state=json.loads(state.read_text()) if state.exists() else {},
        log="".join(path.read_text(errors="replace") for path in sorted(folder.glob("rank-*.log"))),
    )


def _rank(path: Path) -> int:
    return int(re.findall(r"\d+", path.stem)[-1])


def _read_losses(path: Path) -> list[Loss]:
    return [Loss(step=line["step"], bits=line["loss"], time=line["time"]) for line in read_lines(path)]


def _read_spans(path: Path) -> list[Span]:
    rank = _rank(path)
    spans: list[Span] = []
    open_spans: dict[str, Span] = {}
    for line in read_lines(path):
        name, attributes = line["name"], line["attributes"]
        span = Span(
            name=name,
            rank=rank,
            start=line["time"] - (line["duration_seconds"] or 0.0),
            end=None if line["phase"] == "started" else line["time"],
            step=attributes.get("step"),
            size_bytes=attributes.get("size_bytes", 0),
        )
        if line["phase"] == "started":
            open_spans[name] = span
        elif line["phase"] == "finished":
            open_spans.pop(name, None)
            spans.append(span)
    return [*spans, *open_spans.values()]
