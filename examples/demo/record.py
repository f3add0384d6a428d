"""Record the bits of every loss and a digest of every tensor for the comparison."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from ckpt_core.telemetry import Event
from examples.demo.evidence import STATE_FILE


class LossLog:
    """Appends one line per step, so that the records of a killed run stay."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, loss: Tensor) -> None:
        value = float(loss.detach())
        line = {"step": step, "loss": value.hex(), "time": time.time()}
        self._file.write(json.dumps(line) + "\n")


class EventLog:
    """A sink that appends one line per event, so that those of a killed run stay."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def emit(self, event: Event) -> None:
        """Write one event."""
        self._file.write(json.dumps(asdict(event), default=str) + "\n")


def write_state(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, *, rank: int) -> None:
    """Return digests of the full weights and optimizer state. Collective.

    Uses torch's own state-dict API: the comparison must not depend on the code under test.
    """
    options = StateDictOptions(full_state_dict=True)
    weights, gathered = get_state_dict(model, optimizer, options=options)
    optimizer_state: dict[str, Any] = dict(gathered)
    if rank == 0:
        entries: dict[str, Any] = {f"model.{name}": tensor for name, tensor in weights.items()}
        for name, moments in optimizer_state["state"].items():
            entries |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
        entries["param_groups"] = optimizer_state["param_groups"]
        (Path(folder) / STATE_FILE).write_text(
            json.dumps({name: _digest(value) for name, value in sorted(entries.items())})
        )


def leave() -> NoReturn:
    """End this process, without the destructors of torch's static objects.

    With torch 2.13 on gloo they abort about one FSDP2 process in fifteen that has done all its work
    ("terminate called without an active exception"), also where the checkpoint suite is not used at all.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
