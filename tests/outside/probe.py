"""What a training does at each optimizer step, written down by the process itself, and its death.

`OUTSIDE_TRACE` is the file, one line a step: digests of gradients, parameters, optimizer state, learning
rates, and of the generators of torch, numpy and Python. Gradients stand for the data and for dropout. With
`OUTSIDE_KILL=N` the process kills itself after its N-th step, once a checkpoint is committed below the
working directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_COMMIT_SECONDS = 60


def _digest(value: Any) -> str:
    found = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            local = getattr(item, "_local_tensor", item)
            found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key in sorted(item, key=repr):
                add(item[key])
        elif isinstance(item, list | tuple):
            for each in item:
                add(each)
        else:
            found.update(pickle.dumps(item))

    add(value)
    return found.hexdigest()[:16]


def _committed() -> bool:
    return any(Path.cwd().rglob("COMMITTED"))


class _Probe:
    def __init__(self) -> None:
        self._steps = 0
        rank = os.environ.get("RANK", "0")
        self._file = Path(f"{os.environ['OUTSIDE_TRACE']}.{rank}").open("a", encoding="utf-8")  # noqa: SIM115
        self._kill = int(os.environ.get("OUTSIDE_KILL", "0"))

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if type(optimizer).__module__.split(".")[0] in ("accelerate", "lightning"):
            return  # a wrapper of the one that has called already
        self._steps += 1
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = optimizer.state
        seen = {
            "gradients": _digest([p.grad for p in parameters if p.grad is not None]),
            "parameters": _digest(parameters),
            "optimizer": _digest([state[p] for p in parameters if p in state]),
            "rates": [float(group["lr"]) for group in optimizer.param_groups],
            "generators": _digest([torch.get_rng_state(), np.random.get_state()[1:], random.getstate()]),
        }
        self._file.write(json.dumps(seen) + "\n")
        self._file.flush()
        if self._steps == self._kill:
            end = time.monotonic() + _COMMIT_SECONDS
            while not _committed() and time.monotonic() < end:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


OURS = os.environ.get("OUTSIDE_OURS") == "1"
"""Whether this run is to use ours."""

RESUME = os.environ.get("OUTSIDE_RESUME") == "1"
"""Whether a run was killed here before."""

if os.environ.get("OUTSIDE_TRACE"):
    register_optimizer_step_post_hook(_Probe())
    # Scripts seed what they know of; a resumed process begins with other numbers.
    random.seed(1 + RESUME)
    np.random.seed(1 + RESUME)
    torch.manual_seed(1 + RESUME)
