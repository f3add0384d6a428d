"""Damage that a resume finds on arrival ends in exactly one whole checkpoint, or in no save at all."""

from __future__ import annotations

import copy
import errno
import random
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_core import CheckpointManager, Counters, TrainState, Upload
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, OverwrittenError
from ckpt_core.storage import LocalStorage, RangeReader, Storage
from tests.kit.ranks import run_ranks


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
        checkpoints.storage.replace(key, flipped(checkpoints.storage.read_bytes(key), value))


def flip(path: Path, value: torch.Tensor) -> None:
    path.write_bytes(flipped(path.read_bytes(), value))


def flipped(content: bytes, value: torch.Tensor) -> bytes:
    raw, changed = value.detach().numpy().tobytes(), bytearray(content)
    changed[changed.index(raw) + len(raw) // 2] ^= 16
    return bytes(changed)


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


class Flaky(LocalStorage):
    """Bytes come over a network; the first reads of large files fail, or arrive with a flipped bit."""

    rereads_from_memory = False

    def __init__(self, root: Path, *, flips: int = 0, failures: int = 0) -> None:
        super().__init__(root)
        self.flips, self.failures = flips, failures

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        with super().open_ranges(key) as reader:
            yield _FlakyRanges(reader, self)


class _FlakyRanges:
    def __init__(self, reader: RangeReader, storage: Flaky) -> None:
        self.size_bytes = reader.size_bytes
        self._reader, self._storage = reader, storage

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._storage.failures and len(buffer) > 1:  # one byte is what each file is asked for first
            self._storage.failures -= 1
            raise OSError(errno.ETIMEDOUT, "no answer")
        self._reader.read_into(offset, buffer)
        if self._storage.flips:
            self._storage.flips -= 1
            buffer[0] ^= 1


def test_a_transfer_that_fails_twice_costs_no_checkpoint(tmp_path):
    saved = Run(3, stepped="ab", tokens=3)
    save(str(tmp_path), saved)
    live = Run(9, stepped="ab", tokens=9)
    storage = Flaky(tmp_path, flips=2)
    assert resumed(storage, live)[0] == 1
    assert storage.flips == 0
    assert live.everything()["model"] == saved.everything()["model"]
    with CheckpointManager(tmp_path) as checkpoints:
        assert [info.damaged for info in checkpoints.checkpoints()] == [None]


def test_a_marked_checkpoint_is_not_read_on_arrival(tmp_path):
    """So that a restart ends where the run before has found damage, and not half-way again."""
    saved = Run(3, stepped="ab")
    save(str(tmp_path), saved)
    flip(tmp_path / "step-000000001" / "__0_0.distcp", saved.model["a"].weight)
    with pytest.raises(OverwrittenError):
        resumed(Flaky(tmp_path), Run(9, stepped="ab"))
    live = Run(9, stepped="ab")
    before = live.everything()
    with pytest.raises(CorruptCheckpointError, match="Nothing was loaded"):
        resumed(Flaky(tmp_path), live)
    assert live.everything() == before


def test_storage_that_fails_half_way_ends_saves_until_a_resume_succeeds(tmp_path):
    saved, live = Run(3, stepped="ab", tokens=3), Run(9, stepped="ab", tokens=9)
    save(str(tmp_path), saved, Run(4, stepped="ab", tokens=4))
    with CheckpointManager(Flaky(tmp_path, failures=1)) as checkpoints:
        with pytest.raises(OverwrittenError, match=r"partly overwritten.*no answer") as caught:
            checkpoints.resume(live.state)
        assert (caught.value.step, caught.value.damaged) == (2, False)
        assert live.everything()["counters"] == {"tokens": 9}
        with pytest.raises(OverwrittenError, match=r"step-000000002 was loaded in part.*model\.a"):
            checkpoints.save(5, live.state)
        checkpoints.load(live.state, items=["counters"])
        with pytest.raises(OverwrittenError, match="would be a mixture"):
            checkpoints.save(5, live.state)
        assert checkpoints.resume(live.state) == 2
        checkpoints.save(5, live.state)


def test_another_state_is_saved_by_another_manager(tmp_path):
    save(str(tmp_path), Run(3, stepped="ab"))
    with CheckpointManager(Flaky(tmp_path, failures=1)) as checkpoints:
        refusal = outcome(lambda: checkpoints.resume(Run(9, stepped="ab").state))[1]
        assert isinstance(refusal, OverwrittenError)
        checkpoints.start_afresh()
        with pytest.raises(OverwrittenError, match="make a new CheckpointManager"):
            checkpoints.save(5, Run(8, stepped="ab").state)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.start_afresh()
        checkpoints.save(5, Run(8, stepped="ab").state)


def test_a_copy_in_another_tier_is_taken_before_an_older_step(tmp_path):
    place, other = new_place(), str(tmp_path / "far")
    saved = [Run(3, stepped="ab"), Run(4, stepped="ab")]
    with CheckpointManager(place, upload=Upload(other)) as checkpoints:
        for step, run in enumerate(saved, 1):
            checkpoints.save(step, run.state).result()
    damage(place, 2, saved[1].model["a"].weight)
    live = Run(9, stepped="ab")
    with CheckpointManager(place, upload=Upload(other)) as checkpoints:
        assert checkpoints.resume(live.state) == 2
    assert live.everything()["model"] == saved[1].everything()["model"]


def sharded(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = distribute_tensor(torch.full((40, 100), value), mesh, [Shard(0)])
    return {"sharded": tensor, "counters": Counters(tokens=value)}


def resume_job(root: str) -> list[Any]:
    """Resume where rank 1 finds damage in the newest, then where it does in all that is left."""
    with CheckpointManager(root) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, sharded(float(step))).result()
    found: list[Any] = []
    for step in (2, 1):
        if dist.get_rank() == 1:
            flip(Path(root) / f"step-{step:09d}" / "__1_0.distcp", torch.full((20, 100), float(step)))
        dist.barrier()
        live = sharded(9.0)
        with CheckpointManager(Flaky(Path(root)), deadline_seconds=60) as checkpoints:
            resumed_step, error = outcome(partial(checkpoints.resume, live))
            values = set(live["sharded"].to_local().flatten().tolist())
            refusal = outcome(partial(checkpoints.save, 5, live))[1] if error else None
        found.append((resumed_step, type(error), values == {1.0}, str(refusal)))
        dist.barrier()
    return found


@pytest.mark.distributed
def test_damage_that_one_rank_finds_on_arrival_has_the_same_end_on_all(tmp_path):
    """Rank 0 finds none, and has what it read; it must not keep it, nor save it."""
    of_ranks = run_ranks(resume_job, 2, str(tmp_path), timeout_seconds=90)
    assert [found[0] for found in of_ranks] == [(1, type(None), True, "None")] * 2
    for found in of_ranks:
        step, error, _, refusal = found[1]
        assert (step, error) == (None, OverwrittenError)
        assert "it would be a mixture" in refusal
    assert not (tmp_path / "step-000000005").exists()
