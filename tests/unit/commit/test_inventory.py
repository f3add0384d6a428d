"""What the owner of a root remembers is what a stranger would read there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ckpt_core.commit import Catalog, Inventory, begin, commit, remove
from ckpt_core.names import run_name, step_name
from ckpt_core.types import Lineage
from tests.kit.memory import MemoryStorage
from tests.unit.commit.checkpoints import bucket_like, manifest_of, posix_like


class Root:
    """A root that its owner and others change in turns, at random."""

    def __init__(self, storage, seed):
        self.storage, self.luck = storage, random.Random(seed)
        self.catalog, self.inventory = Catalog(storage), Inventory(storage)
        self.lineage, self.begun, self.step = self.new_lineage(1, ()), 1, 0

    def new_lineage(self, number, ancestry):
        return Lineage(id=f"{self.luck.getrandbits(32):08x}", number=number, ancestry=ancestry)

    def committed(self):
        self.step += self.luck.randint(1, 3)
        name = step_name(self.step)
        if self.storage.exists(name) or self.storage.list(name):
            name = run_name(name, self.lineage.id)
        save_id = f"{self.luck.getrandbits(32):08x}"
        manifest = replace(manifest_of(self.step, {}), save_id=save_id, lineage=self.lineage)
        return commit(self.storage, begin(self.storage, name, save_id), name, manifest)

    def owner_saves(self):
        self.inventory.note_written(self.committed())

    def other_saves(self):
        self.committed()

    def goes_back(self):
        infos = self.catalog.committed()
        if infos:
            origin = self.luck.choice(infos)
            self.begun += 1
            older = ((origin.lineage.id, origin.step), *origin.lineage.ancestry)
            self.lineage = self.new_lineage(self.begun, older)
            self.step = origin.step
            self.owner_saves()

    def starts_afresh(self):
        self.begun += 1
        self.lineage, self.step = self.new_lineage(self.begun, ()), 0
        self.owner_saves()

    def some(self):
        infos = self.catalog.committed(abandoned=True)
        return self.luck.choice(infos) if infos else None

    def owner_removes(self):
        if info := self.some():
            remove(self.storage, info)
            self.inventory.forget(info.name)

    def other_removes(self):
        if info := self.some():
            self.storage.delete(info.name)

    def pins(self):
        if info := self.some():
            self.catalog.pin(info.step, "paper")

    def marks(self):
        if info := self.some():
            self.luck.choice([self.catalog.mark_damaged, self.catalog.mark_bad])(info.name, "why")

    def unmarks(self):
        if info := self.some():
            self.catalog.unmark(info.name, bad=self.luck.random() < 0.5)

    def loses_a_marker(self):
        if (info := self.some()) and info.name not in self.inventory._known:
            self.storage.replace(f"{info.name}/COMMITTED", b"no marker")

    def puts_files_there(self):
        self.storage.write_bytes(f"logs-{self.luck.random()}/events", b"x")


STEPS = [
    *[Root.owner_saves] * 6,
    *[Root.other_saves] * 2,
    Root.goes_back,
    Root.starts_afresh,
    *[Root.owner_removes] * 2,
    Root.other_removes,
    Root.pins,
    Root.marks,
    Root.unmarks,
    Root.loses_a_marker,
    Root.puts_files_there,
]


@pytest.mark.parametrize("make", [posix_like, bucket_like])
@pytest.mark.parametrize("seed", range(6))
def test_the_inventory_is_what_the_catalog_reads(make, seed):
    root = Root(make(), seed)
    for _ in range(50):
        root.luck.choice(STEPS)(root)
        if root.luck.random() < 0.7:
            remembered, read = root.inventory.survey(), root.catalog.survey()
            assert remembered.everything == read.everything
            assert remembered.committed == read.committed
            assert remembered.lineage == read.lineage
            assert remembered.unreadable.keys() == read.unreadable.keys()


def test_what_a_survey_returns_does_not_change_with_the_inventory():
    root = Root(posix_like(), 0)
    for _ in range(3):
        root.owner_saves()
    survey = root.inventory.survey()
    before = list(survey.committed)
    root.owner_saves()
    root.inventory.forget(before[0].name)
    assert survey.committed == before


def test_a_checkpoint_that_took_a_name_during_a_survey_is_the_one_remembered():
    """Another thread commits under a name while a survey reads the checkpoint that had it before."""

    class Overtaken(MemoryStorage):
        overtake = None

        def open(self, key):
            reader = super().open(key)
            overtake, self.overtake = self.overtake, None
            if overtake is not None:
                overtake()
            return reader

    root = Root(storage := Overtaken(), 0)
    before = root.committed()
    after = replace(before, created=before.created + 1, save_id="f" * 8)
    storage.overtake = lambda: root.inventory.note_written(after)
    root.inventory.survey()
    assert storage.overtake is None
    assert root.inventory.survey().everything == [after]
