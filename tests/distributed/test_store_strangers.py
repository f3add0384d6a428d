"""What lies in the job's store and no rank wrote is never run; what is not plain is not sent."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

import accelerate_ckpt
import ckpt_core
import lightning_ckpt
from ckpt_core import CheckpointManager
from ckpt_core.coordination import StoreCoordinator, coordinator_for_job
from ckpt_core.errors import CheckpointError
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed


class Canary:
    """Leaves a directory behind if anything unpickles it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class Stranger:
    """Another client of the job's store, who knows every key."""

    def __init__(self, coordinator: StoreCoordinator, canary: str) -> None:
        connection: Any = _get_default_store()
        self._store: Any = PrefixStore(coordinator._prefix, connection.clone())
        self._bait = pickle.dumps({"value": Canary(canary)})

    def leaves(self, key: str) -> None:
        self._store.set(key, self._bait)


def outcome(act: Any) -> Any:
    try:
        return act()
    except CheckpointError as error:
        return type(error).__name__, str(error)


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
        assert found == 1 or "a message that" in found[1] or "gave up waiting" in found[1]
    assert not Path(f"{tmp_path}/root-ran").exists()


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
            assert f"rank {rank}: MessageError: a builtins.object cannot go to other ranks" in text


LISTENS = re.compile(
    r"\b(create_server|start_server|socketserver|http\.server|hmac)\b|\.listen\(|socket\.socket\("
)


def test_no_shipped_module_listens_at_a_port_or_makes_up_a_proof_of_its_own():
    packages = [Path(module.__file__).parent for module in (ckpt_core, lightning_ckpt, accelerate_ckpt)]
    found = [
        f"{path}:{number}"
        for package in packages
        for path in package.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if LISTENS.search(line)
    ]
    assert found == []
