"""Processes that die in the middle of a save, and fresh ones that look at what they left.

The state is a function of the step, so that a checkpoint can be recognised by its values alone. Run as a
script, this forks one child per task: torch is imported and warm once, and no thread runs when it forks.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_core import CheckpointManager, KeepLatest, TrainState
from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage, kill_process

READS = {"open", "read", "size", "list"}  # after one of them, storage is as it was before
KEPT = 2
SWEPT = range(3, 4)
FIRST_STEPS = (1, 2)
LAST_NAME = "last.ckpt"
DRAFT = re.compile(r"\.(writer|pins)\.json\.[0-9a-f]{8}\.tmp")


def state_of(step: int) -> TrainState:
    """A model and an optimizer whose every value depends on the step."""
    torch.manual_seed(step)
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.randn(3, 4)
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer)


def values(state: TrainState) -> list[Any]:
    """All of the state that `state_of` makes a function of the step."""
    captured = state.capture()
    tree = captured.sharded[""]
    momentum = [buffers["momentum_buffer"].tolist() for buffers in tree["optimizer"]["state"].values()]
    weights = [tensor.tolist() for tensor in tree["model"].values()]
    return [weights, momentum, torch.random.get_rng_state().tolist()[:64]]


def manager(root: str | Storage) -> CheckpointManager:
    return CheckpointManager(root, keep=KeepLatest(KEPT))


def train(storage: Storage, steps: Iterator[int] | range, acknowledge: Callable[[int], None]) -> None:
    """Resume, then save each step and say so once it is committed; every save also replaces `last.ckpt`."""
    with manager(storage) as checkpoints:
        checkpoints.resume(state_of(0))
        for step in steps:
            checkpoints.save(step, state_of(step)).result()
            acknowledge(step)
            checkpoints.save(step, state_of(step), name=LAST_NAME).result()
        checkpoints.wait()


def prepared(root: Path) -> None:
    """A root with a little history, and a torn save that the next job has to clear away."""
    train(LocalStorage(root), range(FIRST_STEPS[0], FIRST_STEPS[-1] + 1), lambda _step: None)
    torn = root / "step-000000009.incomplete-0123abcd"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")


def inspect(root: Path, acknowledged: int) -> dict[str, Any]:
    """What a fresh process finds; raises where a promise is broken."""
    storage = LocalStorage(root)
    before = Catalog(storage).committed()
    assert len(before) >= KEPT, f"only {before} are left"
    assert all(verify(storage, info.name) == [] for info in before), "a committed checkpoint is damaged"
    state = state_of(0)
    with manager(storage) as checkpoints:
        step = checkpoints.resume(state)
        assert step is not None, "nothing to resume from"
        assert step >= acknowledged, f"step {acknowledged} was acknowledged, {step} was resumed"
        assert values(state) == expected(step), f"step {step} holds other values"
        torn = Catalog(storage).torn()
        assert torn == [], f"left over: {torn}"
        checkpoints.save(step + 100, state_of(step + 100)).result()
        checkpoints.wait()
        latest = checkpoints.latest()
        assert latest is not None
        assert latest.step == step + 100
    stray = {path.name for path in root.iterdir()} - {info.name for info in Catalog(storage).committed()}
    # A kill between the draft of a small file and its rename costs that draft, for good.
    stray = {name for name in stray if DRAFT.fullmatch(name) is None}
    assert stray <= {"writer.json.lock"}, f"left over: {stray}"
    return {"resumed": step}


def expected(step: int) -> list[Any]:
    return values(state_of(step))


def rehearse(root: Path) -> list[str]:
    """Every storage operation of the job that will be killed, in order."""
    storage = FaultyStorage(LocalStorage(root))
    train(storage, SWEPT, lambda _step: None)
    return [f"{operation.method} {operation.key}" for operation in storage.operations]


def forked(act: Callable[[Callable[[Any], None]], None]) -> tuple[int, list[Any]]:
    """Run `act(tell)` in a forked child: its wait status, and what it told before it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            act(lambda message: os.write(writer, json.dumps(message).encode() + b"\n") and None)
        except BaseException:
            os.write(writer, json.dumps({"error": traceback.format_exc()}).encode() + b"\n")
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        told = [json.loads(line) for line in stream if line.endswith("\n")]
    return os.waitpid(child, 0)[1], told


def verdict(label: str, root: Path, acknowledged: list[int]) -> dict[str, Any]:
    last = max(acknowledged, default=FIRST_STEPS[-1])
    status, told = forked(lambda tell: tell(inspect(root, last)))
    assert told, f"{label}: the inspector ended with status {status}"
    return {"label": label, "acknowledged": last, **told[-1]}


def sweep(folder: Path, every: int, first: int) -> list[dict[str, Any]]:
    """Kill before and after every operation, or every `every`th of these points, from number `first` on."""
    template = folder / "template"
    forked(lambda _tell: prepared(template))
    shutil.copytree(template, folder / "rehearsal")
    _, told = forked(lambda tell: tell(rehearse(folder / "rehearsal")))
    operations: list[str] = told[0]
    moments = [
        (number, when)
        for number, operation in enumerate(operations)
        for when in (("before",) if operation.split()[0] in READS else ("before", "after"))
    ]
    outcomes = []
    for number, when in moments[first::every]:
        root = folder / f"{when}-{number}"
        shutil.copytree(template, root)
        fault = Fault(nth=number, **{when: kill_process})
        label = f"{when} operation {number}, {operations[number]}"
        status, acknowledged = forked(
            lambda tell, root=root, fault=fault: train(
                FaultyStorage(LocalStorage(root), [fault]), SWEPT, tell
            )
        )
        outcome = verdict(label, root, acknowledged)
        outcomes.append({**outcome, "killed": os.WIFSIGNALED(status)})
        shutil.rmtree(root)
    return outcomes


def ambush(folder: Path, kills: int, seed: int) -> list[dict[str, Any]]:
    """Kill a process that saves in a tight loop at random moments; it always goes on from where it was."""
    chance = random.Random(seed)
    root = folder / "ambushed"
    forked(lambda _tell: prepared(root))
    outcomes, last = [], FIRST_STEPS[-1]
    for number in range(kills):
        acknowledged = ambushed(root, last, chance.uniform(0.0, 0.25))
        outcome = verdict(f"kill {number}", root, [last, *acknowledged])
        outcomes.append({**outcome, "killed": True})
        if "error" in outcome:
            break
        last = outcome["resumed"] + 100
    return outcomes


def ambushed(root: Path, last: int, patience_seconds: float) -> list[int]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)

        def tell(step: int) -> None:
            os.write(writer, f"{step}\n".encode())

        tell(last)
        train(LocalStorage(root), range(last + 1, last + 90), tell)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        stream.readline()
        time.sleep(patience_seconds)  # the random moment is what is tested
        os.kill(child, signal.SIGKILL)
        acknowledged = [int(line) for line in stream if line.endswith("\n")]
    os.waitpid(child, 0)
    return acknowledged


def main() -> None:
    torch.set_num_threads(1)
    values(state_of(0))
    kind, folder, count, number = sys.argv[1:]
    job = sweep if kind == "sweep" else ambush
    print(json.dumps(job(Path(folder), int(count), int(number))))


if __name__ == "__main__":
    main()
