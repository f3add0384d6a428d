"""A load that fails leaves every tensor, optimizer value and random number generator as it was."""

from __future__ import annotations

import errno
import random
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_core import CheckpointError, CheckpointManager, Counters, TrainState
from ckpt_core.errors import CorruptCheckpointError, IncompatibleCheckpointError, LoadError
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage

STEP = "step-000000001"


class Stubborn:
    """Refuses every state but its own."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if state["value"] != self.value:
            raise ValueError("not mine")


class Run:
    def __init__(self, seed: int, **items) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400), nn.Linear(400, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=seed / 10)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.counters = Counters(epoch=seed)
        self.items = items
        for _ in range(seed):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 300)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            counters=self.counters,
            **items,
        )

    def everything(self):
        """All values, bit for bit, and where the tensors lie."""
        tensors = dict(self.model.state_dict())
        for number, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"{number}.{name}": value for name, value in state.items()}
        return (
            {name: (value.data_ptr(), value.numpy().tobytes()) for name, value in tensors.items()},
            [{**group, "params": len(group["params"])} for group in self.optimizer.param_groups],
            {k: v for k, v in self.scheduler.state_dict().items() if not callable(v)},
            dict(vars(self.counters)),
            random.getstate(),
            [part.tobytes() if hasattr(part, "tobytes") else part for part in np.random.get_state()],
            torch.get_rng_state().numpy().tobytes(),
        )


@pytest.fixture
def root(tmp_path) -> Path:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, Run(1).state)
    return tmp_path / "run"


def fails(root, run, error=CheckpointError, **options) -> CheckpointError:
    before = run.everything()
    with pytest.raises(error) as caught, CheckpointManager(root, **options) as checkpoints:
        checkpoints.load(run.state, step=1)
    assert run.everything() == before
    return caught.value


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 16
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["read", "full"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_flipped_bit_changes_nothing_live(root, part, verify):
    path = root / STEP / "__0_0.distcp"
    flip(path, int(part * path.stat().st_size))
    error = fails(root, Run(2), CorruptCheckpointError, verify=verify)
    assert "__0_0.distcp" in str(error)
    assert "Nothing was loaded" in str(error)


@pytest.mark.parametrize(
    "name",
    [".metadata", "chunks-00000.json.z", "rank-00000.json", "shared.json", "manifest.json", "COMMITTED"],
)
def test_a_damaged_small_file_changes_nothing_live(root, name):
    flip(root / STEP / name, 40)
    fails(root, Run(2))


@pytest.mark.parametrize("verify", ["off", "read", "full"])
def test_a_truncated_or_missing_file_changes_nothing_live(root, verify):
    path = root / STEP / "__0_0.distcp"
    content = path.read_bytes()
    path.write_bytes(content[:-5000])
    fails(root, Run(2), CorruptCheckpointError, verify=verify)
    path.unlink()
    error = fails(root, Run(2), CorruptCheckpointError, verify=verify)
    assert "missing" in str(error)


def test_damage_found_on_arrival_fails_the_load_and_says_what_it_has_touched():
    """A promise given up where asked for; the default finds the same damage before anything changes."""
    place = f"memory://{uuid.uuid4().hex}/run"
    with CheckpointManager(place) as checkpoints:
        checkpoints.save(1, Run(1).state).result()
        key = f"{STEP}/__0_0.distcp"
        content = bytearray(checkpoints.storage.read_bytes(key))
        content[content.index(b"PK", 200_000) - 5000] ^= 16
        checkpoints.storage.replace(key, bytes(content))
    with (
        CheckpointManager(place, verify="arrival") as checkpoints,
        pytest.raises(LoadError, match=r"partly overwritten.*differ from those that were saved"),
    ):
        checkpoints.load(Run(2).state, step=1)
    fails(place, Run(2), CorruptCheckpointError, verify="read")


def test_a_hole_is_found(root):
    path = root / STEP / "__0_0.distcp"
    size = path.stat().st_size
    content = bytearray(path.read_bytes())
    content[size // 2 : size // 2 + 65536] = bytes(65536)
    path.write_bytes(content)
    fails(root, Run(2), CorruptCheckpointError)


def test_two_swapped_tensors_are_found(root):
    path = root / STEP / "__0_0.distcp"
    content = path.read_bytes()
    first = Run(1).model[0].weight.detach().numpy().tobytes()
    place = content.index(first)
    other = content[place + len(first) :][: len(first)]
    path.write_bytes(content[:place] + other + first + content[place + 2 * len(first) :])
    fails(root, Run(2), CorruptCheckpointError)


def test_a_model_of_another_shape_changes_nothing_live(root):
    run = Run(2)
    run.model[2] = nn.Linear(400, 2)
    run.state = TrainState(model=run.model)
    fails(root, run, IncompatibleCheckpointError)


def test_an_item_that_refuses_changes_nothing_live(tmp_path):
    item = Stubborn()
    with CheckpointManager(tmp_path) as checkpoints:
        item.value = 5
        checkpoints.save(1, Run(1, item=item).state)
    error = fails(tmp_path, Run(2, item=Stubborn()), IncompatibleCheckpointError)
    assert "item (Stubborn) refused its saved state" in str(error)


def test_storage_that_fails_before_it_was_verified_changes_nothing_live(root):
    fault = Fault(method="read_into", key="*.distcp", error=OSError(errno.ETIMEDOUT, "no answer"))
    storage = FaultyStorage(LocalStorage(root), [fault])
    error = fails(storage, Run(2), LoadError)
    assert "Nothing was loaded" in str(error)


def test_a_load_that_succeeds_changes_everything(root):
    run, saved = Run(2), Run(1)
    with CheckpointManager(root) as checkpoints:
        checkpoints.load(run.state, step=1)
    mine, theirs = run.everything(), saved.everything()
    assert [bits for _, bits in mine[0].values()] == [bits for _, bits in theirs[0].values()]
    assert mine[1:4] == theirs[1:4]


class Remote(LocalStorage):
    """Stands for a store whose bytes come over a network each time."""

    rereads_from_memory = False


class ChangesInBetween:
    """Flips a bit when everything has been verified and reading into place begins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def emit(self, event) -> None:
        if (event.name, event.phase) == ("load.read", "started"):
            flip(self.path, self.path.stat().st_size // 2)


def test_what_changes_after_it_was_verified_is_told_as_half_way_and_not_as_untouched(root, monkeypatch):
    # So many ranks share this machine that nothing of the first reading may be kept.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**15))
    sink = ChangesInBetween(root / STEP / "__0_0.distcp")
    half_way = pytest.raises(LoadError, match="partly overwritten")
    with CheckpointManager(Remote(root), sinks=[sink]) as checkpoints, half_way as caught:
        checkpoints.resume(Run(2).state)
    assert "__0_0.distcp" in str(caught.value)
