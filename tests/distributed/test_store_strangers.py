"""Somebody else at the job's store: nothing of theirs runs or counts; ranks with other keys do not begin."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ckpt_core import CheckpointManager
from ckpt_core.coordination import Coordinator, StoreCoordinator, coordinator_for_job
from ckpt_core.errors import CheckpointError
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

KEY = "the same random text on all ranks"


class Canary:
    """Leaves a directory behind if anything unpickles it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class Stranger:
    """Another client of the job's store, who knows every key and no secret."""

    def __init__(self, coordinator: StoreCoordinator, canary: str) -> None:
        connection: Any = _get_default_store()
        self._store: Any = PrefixStore(coordinator._prefix, connection.clone())
        self._bait = pickle.dumps({"value": Canary(canary)})

    def leaves(self, key: str) -> None:
        self._store.set(key, self._bait)

    def waits_for(self, key: str) -> None:
        self._store.wait([key], timedelta(seconds=30))


def outcome(act: Any) -> Any:
    try:
        return act()
    except CheckpointError as error:
        return type(error).__name__, str(error)


def visited(folder: str) -> dict[str, Any]:
    """What two ranks come to, where a stranger leaves messages in the place of one of them."""
    coordinator: Any = coordinator_for_job(deadline_seconds=10)
    connected: Any = coordinator._current
    channel = coordinator.commit_channel()
    stranger, rank = Stranger(connected, f"{folder}/ran"), connected.rank
    found: dict[str, Any] = {}
    if rank == 0:
        found["arrival"] = outcome(lambda: coordinator.gather(0))
        stranger.leaves("main/gather_scatter/1/depart/1")
        next(connected._sequence)
        coordinator.broadcast(None)
        channel.commit_barrier("before", b"", b"".join, deadline_seconds=10)
        stranger.leaves("background/save/8/said")
    else:
        stranger.leaves("main/gather_scatter/0/arrive/1")
        next(connected._sequence)
        stranger.waits_for("main/gather_scatter/1/depart/1")
        found["reply"] = outcome(lambda: coordinator.gather(1))
        coordinator.broadcast(None)
        channel.commit_barrier("before", b"", b"".join, deadline_seconds=10)
        stranger.waits_for("background/save/8/said")
        found["announcement"] = outcome(lambda: channel.broadcast("save/8", int, deadline_seconds=10))
    found["after"] = coordinator.gather(rank)
    coordinator.close()
    return found


def test_a_stranger_at_the_store_runs_nothing_and_is_not_heard(tmp_path):
    first, second = run_ranks(visited, 2, str(tmp_path))
    for told, key, rank in (
        (first["arrival"], "main/gather_scatter/0/arrive/1", 1),
        (second["reply"], "main/gather_scatter/1/depart/1", 0),
        (second["announcement"], "background/save/8/said", 0),
    ):
        kind, text = told
        assert kind == "CoordinationError"
        assert f"{key} of the job's store, where rank {rank} should have written" in text
        assert "MASTER_PORT" in text
        assert "CKPT_SUITE_KEY" in text
    assert first["after"] == second["after"] == [0, 1]
    assert not (tmp_path / "ran").exists()


def saved(folder: str) -> Any:
    """A save of two ranks while a stranger writes under every key that it will use."""
    state = {"model": {f"layer{i}": torch.full((3,), float(i)) for i in range(8)}}
    with CheckpointManager(folder, deadline_seconds=20) as manager:
        connected: Any = manager._coordinator._current
        if dist.get_rank() == 1:
            stranger = Stranger(connected, f"{folder}-ran")
            for number in range(40):
                for verb in ("gather_scatter", "broadcast", "while planning a save (gather_scatter"):
                    for place in ("arrive/1", "depart/1", "depart", "said", "verdict", "outcome"):
                        stranger.leaves(f"main/{verb}/{number}/{place}")
        dist.barrier()
        return outcome(lambda: manager.save(1, state).result(30).step)


def test_a_job_with_a_stranger_at_its_store_saves_or_says_why_not(tmp_path):
    for found in run_ranks(saved, 2, str(tmp_path / "root")):
        assert found == 1 or "signature of a rank of this job" in found[1]
    assert not Path(f"{tmp_path}/root-ran").exists()


def keyed(keys: list[list[str | None]]) -> list[Any]:
    """What the ranks come to with each of these sets of keys, one after the other."""
    rank, found = dist.get_rank(), []
    for of_rank in keys:
        os.environ.pop("CKPT_SUITE_KEY", None)
        if (key := of_rank[rank]) is not None:
            os.environ["CKPT_SUITE_KEY"] = key

        def talk() -> Any:
            coordinator: Coordinator = coordinator_for_job(deadline_seconds=20)
            heard = coordinator.gather(rank)
            coordinator.close()
            return heard

        found.append(outcome(talk))
    return found


def test_ranks_with_other_keys_are_refused_at_once_and_told_which():
    other = KEY.upper()
    keys = [
        [KEY, KEY, KEY],
        [KEY, KEY, other],
        [KEY, None, KEY],
        [None, KEY, None],
        [KEY, "short", KEY],
        [None, None, None],
    ]
    for rank, found in enumerate(run_ranks(keyed, 3, keys, timeout_seconds=90)):
        together, different, missing, alone, short, none = found
        assert together == none == [0, 1, 2]
        for kind, text in (different, missing, alone, short):
            assert kind == "ConfigError"
            assert "CKPT_SUITE_KEY" in text
            assert KEY not in text
            assert other not in text
        assert "is not the same on all ranks: on rank(s) 2 not that of rank 0" in different[1]
        assert "is set on some ranks, and not on rank(s) 1" in missing[1]
        assert "is set on some ranks, and not on rank(s) 0, 2" in alone[1]
        assert ("has 5 characters, and needs 16" in short[1]) == (rank == 1)


def sends_what_is_not_plain() -> list[Any]:
    coordinator = coordinator_for_job(deadline_seconds=20)
    odd: Any = object()
    found = [
        outcome(lambda: coordinator.gather(odd if coordinator.rank else 1)),
        outcome(lambda: coordinator.broadcast(odd)),
        outcome(lambda: coordinator.run_on_coordinator(lambda: odd)),
        outcome(lambda: coordinator.commit_channel().broadcast("a", lambda: odd, deadline_seconds=20)),
        coordinator.gather("after"),
    ]
    coordinator.close()
    return found


def test_what_is_not_plain_is_refused_on_every_rank_at_once():
    for found in run_ranks(sends_what_is_not_plain, 2):
        assert found.pop() == ["after", "after"]
        for rank, (kind, text) in zip((1, 0, 0, 0), found, strict=True):
            assert kind == "CoordinationError"
            assert (
                f"rank {rank}: MessageError: a builtins.object (['content']) cannot go to other ranks" in text
            )
