"""Jobs that are killed, and fresh ones that look at what they left.

The state is a function of the step, so that a checkpoint can be recognised by its values alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ckpt_core import CheckpointError, CheckpointManager, KeepAll, KeepLatest, TrainState
from ckpt_core.names import data_name, step_name
from ckpt_core.storage import LocalStorage
from tests.support.payloads import first_payload

KEPT: Final = 2
SOUND: Final = 2
"""The last step that was acknowledged before the victim began."""
SWEPT: Final = 3
"""The step that the victim saves; a damaged checkpoint is in its way."""
LAST_NAME: Final = "last.ckpt"
THEIR_NAME: Final = "theirs"
"""A directory in which there is a file of the user's when the victim saves into it."""
ROWS: Final = 8
DEADLINE_SECONDS: Final = 4.0
"""What ranks grant one another where some are killed and others live on."""

FOREIGN: Final = {
    "notes.txt": b"not ours",
    ".hidden.tmp": b"not ours either",
    "step-12/model.pt": b"a name like ours",
    "plots.incomplete-draft/loss.png": b"a name like a torn save's",
    f".replaced-0badc0de-{step_name(1)}/COMMITTED": b"kept for a person to look at",
    f"{LAST_NAME}/tokenizer.json": b"in a checkpoint that is replaced",
    f"{step_name(1)}/adapter/model.bin": b"in a checkpoint that is pruned",
    f"{THEIR_NAME}/args.json": b"in a directory that becomes a checkpoint",
}
"""What the sweep must find untouched."""

TORN: Final = {
    f".incomplete-0123abcd-{step_name(9)}/{data_name(0, 0)}": b"half",
    f".incomplete-0123abcd-{step_name(9)}/part/.metadata": b"half",
    f".trash-4567cdef-{step_name(8)}/{data_name(0, 0)}": b"half deleted",
    ".ckpt-suite/.writer.json.89ab0123.tmp": b"half a claim",
    ".ckpt-suite/.damaged.json.89ab0123.tmp": b"half a mark",
    ".ckpt-suite/.pins.json.89ab0123.tmp": b"half a pin",
}
"""What the next job clears away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """A process's place in its job."""

    number: int = 0
    of: int = 1


ALONE: Final = Rank()


def state_of(step: int, place: Rank = ALONE, columns: int = 3) -> TrainState:
    """A model and an optimizer, sharded over the ranks, whose every value depends on the step."""
    torch.manual_seed(step)
    weight, momentum = torch.randn(ROWS, columns), torch.randn(ROWS, columns)
    model = nn.Linear(columns, ROWS, bias=False)
    model.weight = nn.Parameter(_share(weight, place))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight] = {"momentum_buffer": _share(momentum, place)}
    return TrainState(model=model, optimizer=optimizer)


def values(state: TrainState) -> list[Any]:
    """What of the state this rank holds."""
    tree = state.capture().sharded[""]
    momentum = [buffers["momentum_buffer"] for buffers in tree["optimizer"]["state"].values()]
    return [_local(tensor).tolist() for tensor in (*tree["model"].values(), *momentum)]


def _share(tensor: torch.Tensor, place: Rank) -> torch.Tensor:
    if place.of == 1:
        return tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (place.of,))
    return DTensor.from_local(tensor.chunk(place.of)[place.number], mesh, [Shard(0)], run_check=False)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def manager(root: Path, *, deadline_seconds: float = 60.0, journal: bool = True) -> CheckpointManager:
    """What the victims save with, and those who come after them."""
    return CheckpointManager(
        LocalStorage(root), keep=KeepLatest(KEPT), deadline_seconds=deadline_seconds, journal=journal
    )


def prepare(root: Path, place: Rank) -> None:
    """Fill a root with a little history: sound checkpoints, and a damaged one. Collective."""
    with CheckpointManager(LocalStorage(root), keep=KeepAll()) as checkpoints:
        for step in range(1, SWEPT + 1):
            checkpoints.save(step, state_of(step, place)).result()
            if step == SOUND:
                checkpoints.save(step, state_of(step, place), name=LAST_NAME).result()
    if place.number == 0:
        _flip(root / step_name(SWEPT) / data_name(0, 0))
        for name, content in {**FOREIGN, **TORN}.items():
            path = root / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(content)


def train(
    root: Path,
    place: Rank,
    tell: Callable[[Any], None],
    *,
    deadline_seconds: float = 60.0,
    journal: bool = False,
) -> None:
    """Resume past the damaged checkpoint, save it again, replace another, save among the user's files.

    Every save is acknowledged when it is committed, and so is the failure of one: then the job stops.
    The journal has a thread of its own: with it, the calls of a job have another order each time.
    """
    checkpoints = manager(root, deadline_seconds=deadline_seconds, journal=journal)
    try:
        checkpoints.resume(state_of(0, place))
        for name in (None, LAST_NAME, THEIR_NAME):
            checkpoints.save(SWEPT, state_of(SWEPT, place), name=name).result()
            tell({"committed": SWEPT, "name": name})
        checkpoints.close()
    except CheckpointError as error:
        tell({"failed": str(error)})
        # As a supervisor would end it: what `close` waits for has died.
        return
    tell({"ended": True})


def loop(root: Path, steps: Iterable[int], tell: Callable[[Any], None]) -> None:
    """Save in a tight loop, each step and a replaced `last.ckpt`."""
    with manager(root) as checkpoints:
        checkpoints.resume(state_of(0))
        tell({"resumed": True})
        for step in steps:
            checkpoints.save(step, state_of(step)).result()
            tell({"committed": step, "name": None})
            checkpoints.save(step, state_of(step), name=LAST_NAME).result()
            tell({"committed": step, "name": LAST_NAME})


def copy_of(template: Path, root: Path) -> Path:
    """A fresh copy of a prepared root."""
    shutil.copytree(template, root)
    return root


def _flip(path: Path) -> None:
    """Damage the first tensor, and nothing around it."""
    content = bytearray(path.read_bytes())
    content[first_payload(content)] ^= 1
    path.write_bytes(content)
