"""Jobs of several ranks that save with `replicas=2`; hosts are names in the environment."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt_core import CheckpointError, CheckpointManager, ConfigError, TrainState
from ckpt_core.coordination import HOST_VARIABLE
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.distributed.manager_jobs import build, full_state, train_step
from tests.kit.faults import kill_process

TWIN = ".replica"
MARKER = "COMMITTED"


def _on(hosts: Sequence[str]) -> str:
    host = os.environ[HOST_VARIABLE] = hosts[dist.get_rank()]
    return host


def written_by(directory: Path, rank: int) -> list[Path]:
    """The files that one of two ranks has written: its own, and the twins of the other's."""
    files = [path for path in directory.iterdir() if path.name != MARKER]
    of_one = [p for p in files if p.name.startswith("__1_") or "-00001." in p.name]
    of_zero = [p for p in files if p not in of_one]
    own, other = (of_one, of_zero) if rank else (of_zero, of_one)
    return [
        *(p for p in own if not p.name.endswith(TWIN)),
        *(p for p in other if p.name.endswith(TWIN)),
    ]


def lose_every_file_of_a_host(root: str, strategies: Sequence[str]) -> dict[str, list[str]]:
    """Save, lose all that one host has written, load; the differences, by strategy and host."""
    _on(["a", "b"])
    found: dict[str, list[str]] = {}
    for strategy in strategies:
        place = Path(root) / strategy
        model, optimizer, scheduler = build(strategy)
        state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
        how: dict[str, Any] = {"staging": "overlapped", "arenas": 2} if strategy == "fsdp2" else {}
        with CheckpointManager(place, replicas=2, deadline_seconds=60, **how) as checkpoints:
            for step in (1, 2):
                train_step(model, optimizer, scheduler)
                checkpoints.save(step, state)
            checkpoints.wait()
            expected = full_state(model, optimizer)
        for lost in (0, 1):
            kept = _lose(place / "step-000000002", lost)
            model, optimizer, scheduler = build(strategy)
            state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
            with CheckpointManager(place, deadline_seconds=60) as checkpoints:
                resumed = checkpoints.resume(state)
            loaded = full_state(model, optimizer)
            differing = [name for name in expected if not torch.equal(expected[name], loaded[name])]
            found[f"{strategy}/{lost}"] = [str(resumed), *differing]
            dist.barrier()
            if dist.get_rank() == 0:
                for path, content in kept.items():
                    path.write_bytes(content)
            dist.barrier()
    return found


def _lose(directory: Path, rank: int) -> dict[Path, bytes]:
    """Delete every file that a rank has written; their contents."""
    kept = {path: path.read_bytes() for path in written_by(directory, rank)}
    dist.barrier()
    if dist.get_rank() == 0:
        assert any(path.name == ".metadata" + TWIN * rank for path in kept)
        for path in kept:
            path.unlink()
    dist.barrier()
    return kept


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "by_rank": torch.full((5,), 1.0)}


def partner_dies(root: str, who: int) -> list[Any]:
    """One rank dies while it writes the other's twin; what the survivor learns, and what is committed."""
    _on(["a", "b"])
    death = Fault(method="write", key=f"*step-000000002~/__{1 - who}_*{TWIN}", before=kill_process)
    storage = FaultyStorage(LocalStorage(root), [death] if dist.get_rank() == who else [])
    checkpoints = CheckpointManager(storage, replicas=2, deadline_seconds=4)
    checkpoints.save(1, _state(1))
    checkpoints.wait()
    handle = checkpoints.save(2, _state(2))
    assert handle is not None
    error = handle.committed.exception(30)
    return [type(error).__name__, str(error), [info.step for info in checkpoints.checkpoints()]]


def partner_fails(root: str) -> list[Any]:
    """Rank 1 cannot write rank 0's twin, once; the errors, and the steps that are committed afterwards."""
    _on(["a", "b"])
    full = OSError(28, "No space left on device")
    fault = Fault(method="close", key=f"*step-000000001~/__0_0*{TWIN}", error=full)
    storage = FaultyStorage(LocalStorage(root), [fault] if dist.get_rank() else [])
    checkpoints = CheckpointManager(storage, replicas=2, deadline_seconds=30, on_error="warn")
    error = checkpoints.save(1, _state(1)).committed.exception(30)
    checkpoints.save(2, _state(2)).committed.result(30)
    dist.barrier()
    found = [str(error), [info.step for info in checkpoints.checkpoints()], checkpoints.verify(2)]
    checkpoints.close()
    return found


def partner_hangs(root: str) -> list[Any]:
    """Rank 0 hangs while it writes rank 1's twin, once; the errors, and the steps of the next save."""
    _on(["a", "b"])
    released = threading.Event()
    fault = Fault(method="write", key=f"*step-000000001~/__1_0*{TWIN}", before=lambda _: released.wait(60))
    storage = FaultyStorage(LocalStorage(root), [fault] if dist.get_rank() == 0 else [])
    checkpoints = CheckpointManager(storage, replicas=2, deadline_seconds=4, on_error="warn")
    error = checkpoints.save(1, _state(1)).committed.exception(30)
    released.set()
    dist.barrier()
    checkpoints.save(2, _state(2)).committed.result(30)
    dist.barrier()
    found = [str(error), [info.step for info in checkpoints.checkpoints()]]
    checkpoints.close()
    return [*found, [each.name for each in threading.enumerate() if "twin" in each.name]]


def ranks_disagree(root: str) -> str:
    """Only one rank asks for twins; the error."""
    with CheckpointManager(root, replicas=1 + dist.get_rank(), deadline_seconds=30) as checkpoints:
        try:
            checkpoints.save(1, _state(1))
        except (CheckpointError, ConfigError) as error:
            return str(error)
    return "saved"


def whoever(root: str) -> dict[str, Any]:
    """All that needs no death, in one pair of ranks."""
    return {
        "lost": lose_every_file_of_a_host(f"{root}/hosts", ["fsdp2", "ddp"]),
        "fails": partner_fails(f"{root}/fails"),
        "hangs": partner_hangs(f"{root}/hangs"),
        "disagree": ranks_disagree(f"{root}/disagree"),
    }
