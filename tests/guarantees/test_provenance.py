"""A manifest names where its checkpoint comes from, whatever happened in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ckpt_core import CheckpointManager, KeepLatest, SaveError, TrainState
from ckpt_core.commit import Catalog
from ckpt_core.data import LoaderPosition
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.types import DataPosition, Parent, Provenance
from tests.kit.memory import MemoryStorage


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((4,), float(step))}


def known(checkpoints: CheckpointManager, step: int) -> Provenance:
    catalog = Catalog(checkpoints.storage)
    found = [info for info in catalog.committed(abandoned=True) if info.step == step]
    return catalog.manifest(max(found, key=lambda info: info.created).name).provenance


def parent_step(checkpoints: CheckpointManager, step: int) -> int | None:
    parent = known(checkpoints, step).parent
    return None if parent is None else parent.step


def saved(checkpoints: CheckpointManager, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, state_of(step))


def test_a_parent_is_what_the_state_continues_across_saves_resumes_and_returns():
    storage = MemoryStorage()
    with CheckpointManager(storage, arenas=2) as first:
        saved(first, 1, 2, 3)  # in flight together: each names the one committed before it
    assert [parent_step(first, step) for step in (1, 2, 3)] == [None, 1, 2]
    info = Catalog(storage).find(step=2)
    assert known(first, 3).parent == Parent.of(info)
    assert known(first, 3).parent.manifest_sha256 == info.manifest_sha256
    with CheckpointManager(storage) as resumed:
        resumed.resume(state_of(0))
        saved(resumed, 4)
    assert parent_step(resumed, 4) == 3
    assert known(resumed, 4).run_id != known(first, 3).run_id == known(first, 1).run_id
    with CheckpointManager(storage) as back:
        back.load(state_of(0), step=2)
        saved(back, 5)
        back.wait()
        assert parent_step(back, 5) == 2
        back.load(state_of(0), step=4)  # abandoned by now
        saved(back, 6)
    assert parent_step(back, 6) == 4
    with CheckpointManager(storage) as afresh:
        afresh.start_afresh()
        saved(afresh, 7)
    assert parent_step(afresh, 7) is None
    with CheckpointManager(storage) as told:
        told.continue_from(7)
        saved(told, 8)
    assert parent_step(told, 8) == 7


def test_a_failed_save_is_nobodys_parent():
    fault = Fault(method="create", key="*step-000000002*", error=OSError("a test"))
    storage = FaultyStorage(MemoryStorage(), [fault])
    with CheckpointManager(storage) as checkpoints:
        saved(checkpoints, 1)
        saved(checkpoints, 2)
        with pytest.raises(SaveError):
            checkpoints.wait()
        saved(checkpoints, 3)
    assert parent_step(checkpoints, 3) == 1


def test_a_parent_may_lie_in_another_root():
    storage, other = MemoryStorage(), MemoryStorage()
    with CheckpointManager(other) as source, CheckpointManager(storage) as target:
        saved(source, 10)
        source.load(state_of(0))
        target.begin_from(source)
        saved(target, 11, 12)
        target.wait()
        first = Catalog(other).find(step=10)
        assert known(target, 11).parent == Parent(
            name=first.name,
            step=10,
            save_id=first.save_id,
            manifest_sha256=first.manifest_sha256,
            elsewhere=True,
        )
        assert known(target, 12).parent == Parent.of(Catalog(storage).find(step=11))


def test_a_signature_covers_the_parent_and_so_the_whole_chain():
    signed: dict[str, dict[str, Any]] = {}

    def sign(name: str, manifest: bytes) -> bytes:
        signed[name] = json.loads(manifest)
        return b"s"

    storage = MemoryStorage()
    with CheckpointManager(storage, sign_manifest=sign) as checkpoints:
        saved(checkpoints, 1, 2)
    parent = signed["step-000000002"]["provenance"]["parent"]
    assert parent["manifest_sha256"] == Catalog(storage).find(step=1).manifest_sha256


def test_a_manifest_names_no_machine_and_no_place(tmp_path: Path):
    with CheckpointManager(tmp_path / "run", keep=KeepLatest(1)) as checkpoints:
        saved(checkpoints, 1)
    content = (tmp_path / "run" / "step-000000001" / "manifest.json").read_text()
    assert str(tmp_path) not in content
    assert str(Path.home()) not in content


def loader_of(samples: int, batch: int) -> DataLoader[Any]:
    return DataLoader(torch.arange(samples), batch_size=batch, shuffle=True)


def test_the_data_position_is_counted_in_samples_at_every_batch():
    loader = loader_of(10, 4)
    position = LoaderPosition(loader)

    def now() -> DataPosition | None:
        return position.in_samples(position.state())

    assert now() == DataPosition(samples=0, of=10)
    batches = iter(loader)
    seen = [now() for _ in batches]
    assert seen == [DataPosition(samples=count, of=10) for count in (4, 8, 10)]
    assert now() == DataPosition(samples=10, of=10)  # over
    saved_state = position.state()
    again = LoaderPosition(loader_of(10, 4))
    again.restore(saved_state)
    assert again.in_samples(again.state()) == DataPosition(samples=10, of=10)
    stream = DataLoader(Stream(), batch_size=3)
    tracked = LoaderPosition(stream)
    begun = iter(stream)
    next(begun)
    assert tracked.in_samples(tracked.state()) == DataPosition(samples=3)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(100))


def test_a_train_state_tells_its_position_and_its_host_its_configuration(tmp_path: Path):
    loader = loader_of(12, 3)
    state = TrainState(model=torch.nn.Linear(1, 1), dataloader={"a": loader, "b": loader_of(5, 1)})
    with CheckpointManager(LocalStorage(tmp_path / "run")) as checkpoints:
        batches = iter(loader)
        next(batches)
        next(batches)
        checkpoints.save(2, state)
    assert known(checkpoints, 2).data == {
        "dataloader.a": DataPosition(samples=6, of=12),
        "dataloader.b": DataPosition(samples=0, of=5),
    }
    with CheckpointManager(LocalStorage(tmp_path / "other"), keep=KeepLatest(2)) as kept:
        kept.save(2, state)
    assert len(known(kept, 2).configuration_sha256) == 64
    assert known(kept, 2).configuration_sha256 != known(checkpoints, 2).configuration_sha256


def test_versions_are_those_of_imported_libraries():
    storage = MemoryStorage()
    with CheckpointManager(storage) as checkpoints:
        saved(checkpoints, 1)
    producer = Catalog(storage).manifest("step-000000001").producer
    assert producer["torch"] == torch.__version__
    assert {"ckpt_suite", "python", "torch"} <= producer.keys()
