"""A file of metrics for the textfile collector of Prometheus' node exporter."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError
from ckpt_core.telemetry._save_numbers import SAVE_COST
from ckpt_core.telemetry._spans import Event

_logger = logger_of(__name__)
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_GAUGES: Final = {
    "ckpt_save_step": ("step", "Step of the last save."),
    "ckpt_save_stall_seconds": ("stall_seconds", "Time for which the last save has blocked training."),
    "ckpt_save_slowdown_seconds": ("slowdown_seconds", "Further training time lost during the last save."),
    "ckpt_save_durable_seconds": (
        "durable_seconds",
        "Time from the decision to the commit, of the last save.",
    ),
    "ckpt_save_uploaded_seconds": ("uploaded_seconds", "Time from the decision to a further tier."),
    "ckpt_save_size_bytes": ("size_bytes", "Bytes of the last save."),
    "ckpt_overhead_ratio": ("overhead", "Training time lost to saves so far, of all training time."),
}
_SAVES: Final = "ckpt_saves_total", "Saves of this process, by outcome."
_FAILURES: Final = "ckpt_failures_total", "Failed spans of this process, by name."
_COMMITTED: Final = "ckpt_last_commit_timestamp_seconds", "Unix time of the last commit."


@final
class PrometheusSink:
    """Sink that keeps a file of metrics up to date, replaced as a whole.

    Give it to the coordinator, whose saves they are; on other ranks nothing is written but failures.

    Args:
        path: of the file, in the directory of the textfile collector; ends in `.prom`.
        labels: name -> value, of every metric, such as `{"job": "llama"}`.

    Raises:
        ConfigError: the path or a label is none that the node exporter would take.
    """

    def __init__(self, path: str | os.PathLike[str], *, labels: Mapping[str, str] | None = None) -> None:
        self._path = Path(path)
        self._labels = dict(labels or {})
        problems = [f"label {name!r}" for name in self._labels if not _LABEL.fullmatch(name)]
        problems += [f"label {name!r} is used" for name in self._labels if name in {"outcome", "span"}]
        if self._path.suffix != ".prom":
            problems.append(f"{self._path}: the textfile collector reads files that end in .prom")
        if problems:
            raise ConfigError(f"PrometheusSink: {'; '.join(problems)}")
        self._guard = threading.Lock()
        self._last: dict[str, float] = {}
        self._saves: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._committed: float | None = None
        self._warned = False

    def emit(self, event: Event) -> None:
        """Count the event; write if a metric has changed."""
        with self._guard:
            if self._note(event):
                self._write()

    def _note(self, event: Event) -> bool:
        if event.name == SAVE_COST:
            outcome = str(event.attributes.get("outcome"))
            self._saves[outcome] = self._saves.get(outcome, 0) + 1
            self._last = _gauges(event.attributes)
        elif event.phase == "failed":
            self._failures[event.name] = self._failures.get(event.name, 0) + 1
        elif (event.name, event.phase) == ("save.commit", "finished"):
            self._committed = event.time
        else:
            return False
        return True

    def _write(self) -> None:
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text("".join(self._lines()), encoding="utf-8")
            beside.replace(self._path)
        except OSError as error:
            if not self._warned:
                _logger.warning("%s could not be written: %s", self._path, error)
            self._warned = True

    def _lines(self) -> Iterator[str]:
        for name, (_, about) in _GAUGES.items():
            if name in self._last:
                yield from self._metric(name, about, "gauge", {None: self._last[name]})
        if self._committed is not None:
            yield from self._metric(*_COMMITTED, "gauge", {None: self._committed})
        for (name, about), label, counts in (
            (_SAVES, "outcome", self._saves),
            (_FAILURES, "span", self._failures),
        ):
            if counts:
                of_labels = {(label, value): count for value, count in counts.items()}
                yield from self._metric(name, about, "counter", of_labels)

    def _metric(self, name: str, about: str, kind: str, values: Mapping[Any, float]) -> Iterator[str]:
        yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
        for own, value in values.items():
            labels = {**self._labels, **dict([own] if own else [])}
            listed = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            yield f"{name}{{{listed}}} {value!r}\n" if listed else f"{name} {value!r}\n"


def _gauges(cost: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: cost[attribute] for name, (attribute, _) in _GAUGES.items() if cost.get(attribute) is not None
    }


def _escaped(text: str) -> str:
    return str(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
