"""The journal of a run that is copied to another root."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

from ckpt_core.journal._files import (
    HistoryFile,
    most_of_events,
    read_events,
    read_history,
    refuse_foreign,
    unreadable_lines,
)
from ckpt_core.journal._history import merge, without_end
from ckpt_core.journal._records import Record, decode, encode
from ckpt_core.names import EARLIER_EVENTS, EVENTS
from ckpt_core.storage import Storage


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RunJournal:
    """The journal of a root that is copied.

    Attributes:
        history: how its runs began and ended.
        events: what they did.
        unreadable: lines that are no records, and stay behind.
    """

    history: Sequence[Record]
    events: Sequence[Record]
    unreadable: int

    @classmethod
    def of(cls, source: Storage, *, is_alive: bool) -> RunJournal:
        """Read the journal of a root.

        Args:
            source: the root.
            is_alive: whether a job may be training there: its run, which has no end yet, is left out. In the
                copy it would count as one that died.

        Raises:
            OSError: storage failed.
        """
        history, events = read_history(source), read_events(source)
        going_on = {each["run"] for each in without_end(history)} if is_alive else set[str]()
        return cls(
            history=_without(history, going_on),
            events=_without(events, going_on),
            unreadable=unreadable_lines(source),
        )


@final
class JoinedJournal:
    """The journal of a root, with what it lacks of those copied to it.

    Nothing is lost where training went on in several places.

    Raises:
        OSError: storage failed.
    """

    def __init__(self, target: Storage, journals: Sequence[RunJournal]) -> None:
        history, events = read_history(target), read_events(target)
        self._target = target
        self._history = merge([history, *(each.history for each in journals)])
        joined = join_events([events, *(each.events for each in journals)])
        self._parts = newest_parts(joined, most_of_events(target))
        wanted = {json.dumps(each) for part in self._parts for each in decode(part)}
        self._news = (self._history != history, not wanted <= {json.dumps(each) for each in events})

    @property
    def has_news(self) -> bool:
        """Whether the target lacks something."""
        return any(self._news)

    def write(self) -> None:
        """Write what the target lacks, the history first.

        Raises:
            OSError: storage failed, or a file of a journal's name is not ours.
        """
        new_history, new_events = self._news
        if new_history:
            HistoryFile(self._target).write(self._history)
        if new_events:
            for key in (EVENTS, EARLIER_EVENTS):
                refuse_foreign(self._target, key)
            earlier, newest = self._parts
            self._target.replace(EVENTS, newest)
            if earlier:
                self._target.replace(EARLIER_EVENTS, earlier)
            else:
                self._target.delete(EARLIER_EVENTS)  # what it had is in the other file now


def join_events(logs: Iterable[Sequence[Record]]) -> list[Record]:
    """Join logs of which each may lack something; a run's events stay in order."""
    runs: dict[str, dict[str, Record]] = {}
    for each in chain.from_iterable(logs):
        runs.setdefault(each["run"], {})[json.dumps(each, sort_keys=True)] = each
    ordered = sorted(runs.values(), key=lambda own: float(next(iter(own.values()))["time"]))
    return [each for own in ordered for each in own.values()]


def newest_parts(events: Sequence[Record], most: int) -> tuple[bytes, bytes]:
    """Encode the newest events as the two files of a log, each of limited size."""
    parts: list[list[bytes]] = [[], []]
    sizes = [0, 0]
    at = 1
    for each in reversed(events):
        line = encode([each])
        if sizes[at] + len(line) > most:
            at -= 1
        if at < 0:
            break
        sizes[at] += len(line)
        parts[at].append(line)
    earlier, newest = (b"".join(reversed(lines)) for lines in parts)
    return earlier, newest


def _without(records: Sequence[Record], runs: set[str]) -> list[Record]:
    return [each for each in records if each["kind"] == "summary" or each["run"] not in runs]
