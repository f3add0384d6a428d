"""The choice of a checkpoint over several tiers, in one process with directories as tiers."""

from __future__ import annotations

import shutil

import pytest

from ckpt_core import CheckpointManager
from ckpt_core.commit import Catalog
from ckpt_core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    UntrustedCheckpointError,
)
from ckpt_core.names import SIGNATURE, is_run_file
from ckpt_core.storage import LayeredStorage, LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.memory import MemoryStorage
from tests.unit.tiers.two_tiers import ONE, THREE, TWO, Two, marks, state
from tests.unit.training import children, damage


@pytest.fixture
def two(tmp_path):
    return Two(tmp_path)


@pytest.fixture
def saved(two):
    """Steps 1 to 3, of which the durable tier has 1 and 2."""
    two.save(1, 2, 3)
    two.upload(ONE, TWO)
    return two


SMALL = {"COMMITTED", "damaged.json", "pins.json", "writer.json"}


def reads_below(monkeypatch, root):
    """The keys that are opened below a root from now on."""
    found = []
    for method in ("open", "open_ranges"):
        inner = getattr(LocalStorage, method)

        def opened(self, key, inner=inner):
            if self.url == str(root):
                found.append(key)
            return inner(self, key)

        monkeypatch.setattr(LocalStorage, method, opened)
    return found


def test_the_newest_over_all_tiers_is_resumed(saved):
    assert saved.resumed() == (3, 3.0)
    shutil.rmtree(saved.local / THREE)
    assert saved.resumed() == (2, 2.0)
    saved.lose_local()
    assert saved.resumed() == (2, 2.0)
    saved.save(7, root=saved.durable)
    assert saved.resumed() == (7, 7.0)


def test_of_equal_steps_the_nearest_copy_is_read(saved, monkeypatch):
    shutil.rmtree(saved.local / THREE)
    keys = reads_below(monkeypatch, saved.durable)
    assert saved.resumed() == (2, 2.0)
    assert {name for key in keys if not is_run_file(name := key.rpartition("/")[2])} <= SMALL


def test_damage_falls_back_to_the_same_step_in_the_next_tier(saved, monkeypatch, caplog):
    saved.upload(THREE)
    damage(saved.local, THREE)
    keys = reads_below(monkeypatch, saved.durable)
    assert saved.resumed() == (3, 3.0)
    read = {key for key in keys if key.startswith(THREE)} - {f"{THREE}/{SIGNATURE}"}
    assert read == {f"{THREE}/COMMITTED", f"{THREE}/__0_0.distcp"}
    assert marks(saved.local).keys() == {THREE}
    assert marks(saved.durable) == {}
    assert "__0_0.distcp" in caplog.text
    (event,) = saved.events
    assert (event["name"], event["step"], event["tier"]) == (THREE, 3, str(saved.local))


@pytest.mark.parametrize(
    "lost", ["__0_0.distcp", "manifest.json", "chunks-00000.json.z", ".metadata", "COMMITTED"]
)
def test_a_file_that_the_nearest_copy_lacks_is_read_from_the_next_tier(saved, lost):
    saved.upload(THREE)
    (saved.local / THREE / lost).unlink()
    assert saved.resumed() == (3, 3.0)


def test_copies_damaged_in_different_files_make_a_whole_one(saved):
    saved.upload(THREE)
    damage(saved.local, THREE)
    (saved.durable / THREE / "chunks-00000.json.z").unlink()
    assert saved.resumed() == (3, 3.0)


def test_a_step_damaged_in_every_tier_is_marked_in_each_and_passed_over(saved):
    saved.upload(THREE)
    damage(saved.local, THREE)
    damage(saved.durable, THREE)
    assert saved.resumed() == (2, 2.0)
    assert marks(saved.local).keys() == marks(saved.durable).keys() == {THREE}
    assert [event["tier"] for event in saved.events] == [str(saved.local), str(saved.durable)]


def test_a_copy_that_is_not_trusted_is_replaced_by_a_trusted_one(saved):
    saved.upload(THREE)
    (saved.durable / THREE / SIGNATURE).write_bytes(b"yes")

    def judge(name, manifest, signature):
        return signature == b"yes"

    assert saved.resumed(verify_manifest=judge) == (3, 3.0)
    (saved.durable / THREE / SIGNATURE).unlink()
    with pytest.raises(UntrustedCheckpointError, match="not trusted"):
        saved.resumed(verify_manifest=judge)


@pytest.mark.parametrize("lost", ["local", "durable"])
def test_a_mark_as_bad_outlives_the_tier_that_it_was_set_in(saved, lost):
    saved.upload(THREE)
    root = saved.local if lost == "local" else saved.durable
    Catalog(LocalStorage(root)).mark_bad(THREE, "diverged")
    assert saved.resumed() == (2, 2.0)
    shutil.rmtree(root)
    root.mkdir()
    assert saved.resumed() == (2, 2.0)


def test_a_checkpoint_marked_as_bad_in_any_tier_counts_in_none(saved):
    saved.upload(THREE)
    Catalog(LocalStorage(saved.durable)).mark_bad(THREE, "diverged")
    assert saved.resumed() == (2, 2.0)
    with saved.manager() as checkpoints:
        assert [info.bad for info in checkpoints.checkpoints()] == [None, None, "diverged"]
        checkpoints.unmark(3)
        checkpoints.mark(2, "spikes")
    assert saved.resumed() == (3, 3.0)
    for root in (saved.local, saved.durable):
        assert [info.bad for info in Catalog(LocalStorage(root)).committed()] == [None, "spikes", None]


def test_an_unreachable_tier_is_never_passed_over_silently(saved):
    """Its newest may be newer: only a checkpoint that is named is loaded without it."""
    down = FaultyStorage(MemoryStorage(), [Fault(method="list", error=TimeoutError("down"))])
    with saved.manager(durable=down) as checkpoints:
        loaded = state()
        with pytest.raises(LoadError, match=r"(?s)down.*newest known is step 3.*by its step or path"):
            checkpoints.resume(loaded)
        assert loaded["model"]["w"][0] == -1
        with pytest.raises(LoadError, match="down"):
            checkpoints.latest()
        checkpoints.load(loaded, step=3)
        assert loaded["model"]["w"][0] == 3
        with pytest.raises(LoadError, match="down"):
            checkpoints.load(loaded, step=9)
        checkpoints.save(4, state(4))
    assert saved.resumed() == (4, 4.0)


def test_an_empty_disk_continues_the_lineage_of_the_bucket(saved, caplog):
    present = Catalog(LocalStorage(saved.durable)).survey().lineage
    saved.lose_local()
    with saved.manager() as checkpoints:
        assert checkpoints.resume(state()) == 2
        checkpoints.save(3, state(30))
        checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 2, 3]
    assert Catalog(LocalStorage(saved.local)).survey().lineage == present
    assert "abandoned" not in caplog.text


def test_a_run_begun_afresh_on_an_empty_disk_supersedes_the_bucket(saved, caplog):
    saved.lose_local()
    with saved.manager() as checkpoints:
        checkpoints.save(1, state(10))
        checkpoints.save(2, state(20))
    assert "they are abandoned" in caplog.text
    names = children(saved.local)
    assert all(name.startswith((f"{ONE}.run-", f"{TWO}.run-")) for name in names)
    assert saved.resumed() == (2, 20.0)
    with saved.manager() as checkpoints:
        assert [info.name for info in checkpoints.checkpoints()] == names
        assert len(checkpoints.checkpoints(abandoned=True)) == 4
        loaded = state()
        checkpoints.load(loaded, name=TWO)
        assert loaded["model"]["w"][0] == 2


def test_names_do_not_make_checkpoints_the_same(saved):
    """A disk on which another run has the same steps: the lineage begun last is resumed."""
    saved.lose_local()
    saved.save(1, 2)
    with CheckpointManager(saved.local) as checkpoints:
        checkpoints.save(2, state(20), name=TWO)
    with saved.manager() as checkpoints:
        assert len(checkpoints.checkpoints(abandoned=True)) == 4
    assert saved.resumed() == (2, 20.0)
    damage(saved.local, TWO)
    with pytest.raises(CorruptCheckpointError, match=f"An earlier run left .*{TWO}"):
        saved.resumed()


def test_a_step_that_the_bucket_has_is_not_saved_again(saved):
    saved.lose_local()
    with saved.manager() as checkpoints:
        checkpoints.resume(state())
        with pytest.raises(CheckpointExistsError, match="in a further tier"):
            checkpoints.save(2, state(2))


def test_steps_that_an_abandoned_line_has_in_the_bucket_get_names_of_their_own(saved):
    saved.upload(THREE)
    saved.lose_local()
    with saved.manager() as checkpoints:
        checkpoints.load(state(), step=1)
        checkpoints.save(3, state(33))
        checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 3]
    (name,) = children(saved.local)
    assert name.startswith(f"{THREE}.run-")
    assert saved.resumed() == (3, 33.0)


def test_a_checkpoint_is_listed_verified_and_pinned_over_all_tiers(saved):
    saved.upload(THREE)
    shutil.rmtree(saved.local / ONE)
    with saved.manager() as checkpoints:
        assert [info.step for info in checkpoints.checkpoints()] == [1, 2, 3]
        assert checkpoints.latest().step == 3
        checkpoints.pin(1, "paper")
        assert checkpoints.verify(1) == []
        damage(saved.durable, ONE)
        assert checkpoints.verify(1)
        with pytest.raises(CheckpointNotFoundError, match=r"(?s)local.*durable"):
            checkpoints.load(state(), step=9)
        with pytest.raises(CorruptCheckpointError):
            checkpoints.load(state(), step=1)
    assert marks(saved.durable).keys() == {ONE}
    for root in (saved.local, saved.durable):
        assert Catalog(LocalStorage(root)).pins() == {1: "paper"}


def test_one_tier_makes_the_requests_that_it_made_without_tiers(saved):
    """Also with the durable tier as the only one: nothing else is asked."""
    with CheckpointManager(saved.local) as checkpoints:
        assert checkpoints.resume(state()) == 3
    assert saved.events == []


def test_storages_read_as_one_cannot_be_written(tmp_path):
    first, second = MemoryStorage(), MemoryStorage()
    first.write_bytes("d/a", b"1")
    second.write_bytes("d/a", b"22")
    second.write_bytes("d/b", b"3")
    layered = LayeredStorage(first, second)
    assert [(e.name, e.size_bytes) for e in layered.list("d")] == [("a", 1), ("b", 1)]
    assert layered.read_bytes("d/a") + layered.read_bytes("d/b") == b"13"
    second_of_a = LayeredStorage(first, second, passed_over={"d/a": 1})
    assert second_of_a.read_bytes("d/a") == b"22"
    assert [entry.size_bytes for entry in second_of_a.list("d") if entry.name == "a"] == [2]
    with pytest.raises(FileNotFoundError):
        LayeredStorage(first, second, passed_over={"d/a": 2}).size("d/a")
    with pytest.raises(OSError, match="cannot be written"):
        layered.replace("x", b"")
