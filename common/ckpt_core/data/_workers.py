"""Random numbers of loader workers: sent with batches, and put back.

A worker is seeded once, and draws as it fetches the samples of its batches, often ahead of the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import DataLoader, get_worker_info

from ckpt_core.data._generators import global_state, load_global_state, same_values

_READ_AHEAD = 3
"""Batches of one worker that hosts may have drawn and not trained on, at most."""


@final
@dataclass(frozen=True, slots=True)
class _Numbers:
    """The state of a worker's generators; opaque to the thread that pins memory."""

    worker: int
    state: Mapping[str, Any]


class _Sent(NamedTuple):
    batch: Any
    numbers: _Numbers


@final
class Seat:
    """What a loader's workers do in place of its `worker_init_fn` and `collate_fn`.

    Args:
        loader: has those.
        states: of the workers' generators, where each goes on from one.
        flag: in shared memory; set in place of what would be sent.
    """

    def __init__(
        self, loader: DataLoader[Any], states: Sequence[Mapping[str, Any]], flag: torch.Tensor | None = None
    ) -> None:
        self._init: Any = loader.worker_init_fn
        self._collate: Any = loader.collate_fn
        self._states, self._flag = states, flag
        self._seeded: Mapping[str, Any] = {}

    def begin(self, worker: int) -> None:
        """Seed as the user does, then go on from a state."""
        if self._init is not None:
            self._init(worker)
        self._seeded = _numbers()
        if worker < len(self._states) and (state := self._states[worker]):
            load_global_state({**state, "torch": torch.tensor(bytearray(state["torch"]), dtype=torch.uint8)})

    def collate(self, samples: Any) -> Any:
        """Make a batch; send with it what comes next, if a sample has drawn from it."""
        batch, info, now = self._collate(samples), get_worker_info(), _numbers()
        if info is None or same_values(now, self._seeded):
            return batch
        if self._flag is not None:
            self._flag.fill_(True)  # noqa: FBT003 - torch's signature
            return batch
        return _Sent(batch, _Numbers(info.id, now))


def _numbers() -> dict[str, Any]:
    state = global_state()
    return {**state, "torch": state["torch"].numpy().tobytes()}


@final
class Drawn:
    """The generators of a loader's workers as of each of the last batches.

    Args:
        states: as of its beginning: of every worker, empty for one that has not drawn.
        unknown: batches until all are known.
    """

    def __init__(self, states: Sequence[Mapping[str, Any]] = (), *, unknown: int = 0) -> None:
        self._past = {worker: [(0, state)] for worker, state in enumerate(states)}
        self._unknown = unknown

    def next_epoch(self, batches: int, *, whole: bool, workers: int) -> Drawn:
        """Return those of the same workers' next epoch, after so many batches.

        In one that was not whole they have read ahead, and what that came to was dropped.
        """
        states = self.at(batches)
        return Drawn(states) if whole or not (states or self._unknown) else Drawn(unknown=workers)

    def knows(self, batches: int) -> bool:
        """Return whether the states after so many batches are known."""
        return batches >= self._unknown

    def receive(self, batch: Any, number: int) -> Any:
        """Return what the loop is to see of the batch with this number, counted from 1."""
        if type(batch) is not _Sent:
            return batch
        past = self._past.setdefault(batch.numbers.worker, [(0, {})])
        past[:] = [*past[-_READ_AHEAD:], (number, batch.numbers.state)]
        return batch.batch

    def at(self, batches: int) -> list[Mapping[str, Any]]:
        """Return the states after so many batches; nothing if no worker has drawn."""
        found = {w: [s for number, s in past if number <= batches] for w, past in self._past.items()}
        states = [(found.get(w) or [{}])[-1] for w in range(max(found, default=-1) + 1)]
        return states if any(states) else []
