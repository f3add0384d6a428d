"""What the ranks do of which some are killed in the middle of a save."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt_core import CheckpointManager, KeepLatest, SaveError, TrainState
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage, kill_process


def state_of(step: int) -> TrainState:
    """Sharded over the ranks, with values that depend on the step alone."""
    torch.manual_seed(step)
    model = nn.Linear(8, 6, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn(6, 8))
    fully_shard(model)
    return TrainState(model=model, rng=False)


def weights(state: TrainState) -> list[list[float]]:
    return state.model.weight.full_tensor().tolist()


def save_and_die(root: str, victims: list[int], method: str, key: str) -> str:
    """Save step 1 in peace, then lose the victims while step 2 is being saved."""
    faults = []
    if dist.get_rank() in victims:
        faults = [Fault(method=method, key=f"*step-000000002*{key}", nth=0, before=kill_process)]
    storage = FaultyStorage(LocalStorage(root), faults)
    checkpoints = CheckpointManager(storage, keep=KeepLatest(2), deadline_seconds=6)
    assert checkpoints.resume(state_of(0)) is None
    checkpoints.save(1, state_of(1)).result()
    handle = checkpoints.save(2, state_of(2))
    try:
        handle.result()
    except SaveError as error:
        return str(error)
    return "saved"


def resume_after(root: str) -> dict[str, object]:
    state = state_of(0)
    with CheckpointManager(root, keep=KeepLatest(2), deadline_seconds=30) as checkpoints:
        step = checkpoints.resume(state)
        loaded = weights(state)
        checkpoints.save(3, state_of(3)).result()
        names = [info.name for info in checkpoints.checkpoints()]
        failures = [str(failure) for failure in checkpoints.verify()]
    return {
        "step": step,
        "exact": loaded == weights(state_of(step)),
        "names": names,
        "failures": failures,
    }
