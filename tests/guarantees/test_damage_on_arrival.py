"""Damage that a resume finds on arrival ends in exactly one whole checkpoint, or in no save at all."""

from __future__ import annotations

import copy
import random
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_core import CheckpointManager, Counters, TrainState
from ckpt_core.errors import CheckpointError, OverwrittenError
from ckpt_core.storage import Storage


class Notes:
    """An item that keeps what a checkpoint lacks: large, and so stored with the tensors, or small."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if name in self.values:
                self.values[name].copy_(value)
            else:
                self.values[name] = value


class Run:
    """A training state that a seed determines; `stepped` says whose optimizer state there is."""

    def __init__(
        self, seed: int, *, stepped: str = "", notes: dict[str, int] | None = None, **counts
    ) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"a": nn.Linear(64, 65), "b": nn.BatchNorm1d(65)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=seed / 100)
        for _ in range(seed if stepped else 0):
            for name in stepped:
                for parameter in self.model[name].parameters():
                    parameter.grad = torch.randn_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.counters = Counters(**counts)
        self.notes = Notes({name: torch.randn(size) for name, size in (notes or {}).items()})

    @property
    def state(self) -> TrainState:
        return TrainState(
            model=self.model, optimizer=self.optimizer, counters=self.counters, notes=self.notes
        )

    def everything(self) -> Any:
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        return {
            "model": {name: bits(value) for name, value in self.model.state_dict().items()},
            "optimizer": {
                number: {name: bits(value) for name, value in state.items()}
                for number, state in optimizer["state"].items()
            },
            "groups": optimizer["param_groups"],
            "counters": dict(vars(self.counters)),
            "notes": {name: bits(value) for name, value in self.notes.values.items()},
            "rng": (random.getstate(), bits(torch.get_rng_state()), str(np.random.get_state())),
        }


def bits(value: Any) -> Any:
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


def new_place() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


def save(place: str, *runs: Run) -> None:
    with CheckpointManager(place) as checkpoints:
        for step, run in enumerate(runs, 1):
            checkpoints.save(step, run.state).result()


def damage(place: str, step: int, value: torch.Tensor) -> None:
    """Flip a bit in the middle of a tensor's saved bytes."""
    with CheckpointManager(place) as checkpoints:
        key = f"step-{step:09d}/__0_0.distcp"
        content = bytearray(checkpoints.storage.read_bytes(key))
        raw = value.detach().numpy().tobytes()
        content[content.index(raw) + len(raw) // 2] ^= 16
        checkpoints.storage.replace(key, bytes(content))


def resumed(place: str | Storage, run: Run, verify: str | None = None) -> tuple[int | None, Any]:
    with CheckpointManager(place, verify=verify) as checkpoints:
        step = checkpoints.resume(run.state)
    return step, run.everything()


def test_a_resume_passes_over_what_is_damaged_on_arrival_and_loads_the_one_before_whole():
    place, older, newer = new_place(), Run(3, stepped="ab", tokens=3), Run(4, stepped="ab", tokens=4)
    save(place, older, newer)
    damage(place, 2, newer.model["a"].weight)
    saved = older.everything()
    step, found = resumed(place, Run(9, stepped="ab", tokens=9))
    assert step == 1
    assert {**found, "rng": None} == {**saved, "rng": None}
    with CheckpointManager(place) as checkpoints:
        assert [info.damaged is not None for info in checkpoints.checkpoints()] == [False, True]


def variety(seed: int) -> tuple[Run, Run, Run, str]:
    """Two saved runs and a live one, of other names, items and optimizer states; and what is damaged."""
    chance = random.Random(seed)

    def run(number: int) -> Run:
        # A name has one size: with another the load is refused as of another state.
        sizes = {name: size for name, size in (("x", 10), ("y", 300_000)) if chance.random() < 0.6}
        counts = {name: number for name in ("epoch", "tokens", "best") if chance.random() < 0.7}
        return Run(number, stepped=chance.choice(("", "a", "ab", "b")), notes=sizes, **counts)

    return run(3), run(4), run(9), chance.choice(("weight", "optimizer", "notes"))


def victim(run: Run, what: str) -> torch.Tensor:
    large = [value for value in run.notes.values.values() if value.numel() > 1000]
    state = list(run.optimizer.state.values())
    if what == "notes" and large:
        return large[-1]
    if what == "optimizer" and state:
        return state[0]["exp_avg"]
    return run.model["a"].weight


def outcome(act: Callable[[], Any]) -> tuple[Any, CheckpointError | None]:
    try:
        return act(), None
    except CheckpointError as error:
        return None, error


@pytest.mark.parametrize("seed", range(40))
def test_a_resume_is_that_of_verify_read_or_refuses_every_save(seed):
    """Whatever two checkpoints and the live state hold, and whatever is damaged."""
    older, newer, _, what = variety(seed)
    place = new_place()
    save(place, older, newer)
    damage(place, 2, victim(newer, what))
    other = variety(seed)[2]
    before = other.everything()
    try:
        expected: Any = resumed(place, other, "read")
    except CheckpointError as error:
        expected = error
        assert other.everything() == before
    again = variety(seed)[2]
    assert again.everything() == before
    with CheckpointManager(place) as checkpoints:
        found, error = outcome(lambda: checkpoints.resume(again.state))
        if error is None:
            assert (found, again.everything()) == expected
            checkpoints.save(5, again.state)
        elif again.everything() != before:
            assert isinstance(error, OverwrittenError)
            assert "partly overwritten" in str(error)
            assert error.step == 2
            checkpoints.start_afresh()
            with pytest.raises(OverwrittenError, match="would be a mixture"):
                checkpoints.save(5, again.state)
            assert [info.step for info in checkpoints.checkpoints()] == [1, 2]
