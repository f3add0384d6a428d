"""Whatever a kill leaves in a root is collected or put back by the next run, and nothing else is touched."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import pytest

from ckpt_core import CheckpointManager
from ckpt_core.commit import Catalog, collect_orphans, verify
from ckpt_core.commit._catalog import locked
from ckpt_core.names import WRITER
from ckpt_core.storage import LocalStorage
from tests.guarantees import leftover_jobs
from tests.guarantees.leftover_jobs import claim, mark, pin, prune, replace_last, set_quarantine, sweep_mark
from tests.kit.own_files import beside_own
from tests.kit.ranks import run_ranks
from tests.unit.commit.checkpoints import save, save_over

pytestmark = pytest.mark.reliability

FOREIGN = {
    "notes.txt": b"mine",
    ".notes.txt.swp": b"an editor's",
    "my.trash-bin/file": b"mine too",
    ".hidden.tmp": b"",
    "run.exchange/file": b"x",
}


def killed(job, root, method, nth=0):
    """Do a job until it is killed before the nth call of a function of `os`; False if it was not."""
    forkserver = multiprocessing.get_context("forkserver")
    process = forkserver.Process(target=leftover_jobs.run, args=(job, root, method, nth), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode in {0, -signal.SIGKILL}
    return process.exitcode != 0


def plant(root):
    for name, content in FOREIGN.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def next_run(root):
    """What a fresh job finds once it has taken the root: name -> step."""
    plant(root)
    with CheckpointManager(root) as checkpoints:
        checkpoints._own_root()
        infos = checkpoints.checkpoints()
    assert {name: (root / name).read_bytes() for name in FOREIGN} == FOREIGN
    assert all(verify(LocalStorage(root), info.name) == [] for info in infos)
    return {info.name: info.step for info in infos}


def strays(root):
    """Everything that is neither a checkpoint nor a file that is meant to stay."""
    checkpoints = {info.name for info in Catalog(LocalStorage(root)).committed()}
    return beside_own(root) - checkpoints - {WRITER} - {name.partition("/")[0] for name in FOREIGN}


@pytest.mark.slow
@pytest.mark.parametrize("job", [claim, pin, mark])
def test_a_draft_of_a_small_file_is_removed_by_the_next_run(tmp_path, job):
    assert killed(job, tmp_path, "replace")
    assert len(strays(tmp_path)) == 1
    assert next_run(tmp_path) == {"last.ckpt": 1, "step-000000001": 1, "step-000000002": 2}
    assert strays(tmp_path) == set()
    assert Catalog(LocalStorage(tmp_path)).pins() == {}


@pytest.mark.slow
def test_a_kill_at_any_call_of_ckpt_mark_leaves_the_marks_of_before_or_all_of_them(tmp_path):
    (found,) = run_ranks(sweep_mark, 1, tmp_path / "run", process_group=False)
    one, two = "step-000000001", "step-000000002"
    assert len(found) > 8
    assert all(killed and damaged == [one] and again == 0 for killed, damaged, _, again in found)
    bad = [marked for _, _, marked, _ in found]
    assert sorted(bad) == bad, "a mark that is there stays"
    assert (bad[0], bad[-1]) == ([], [two])


@pytest.mark.slow
@pytest.mark.parametrize(("renames", "left"), [(0, 1), (1, 1), (2, 2)])
def test_a_replacement_cut_short_without_exchange_loses_neither_name_nor_checkpoint(tmp_path, renames, left):
    assert killed(replace_last, tmp_path, "rename", renames)
    catalog = Catalog(LocalStorage(tmp_path))
    assert catalog.find(name="last.ckpt").step == left, "readers must find it before any job has tidied up"
    assert len(catalog.committed()) == 3
    assert next_run(tmp_path) == {"last.ckpt": left, "step-000000001": 1, "step-000000002": 2}
    assert strays(tmp_path) == set()


@pytest.mark.slow
def test_without_exchange_three_renames_replace(tmp_path):
    assert not killed(replace_last, tmp_path, "rename", 3)
    assert next_run(tmp_path) == {"last.ckpt": 2, "step-000000001": 1, "step-000000002": 2}


def test_what_waits_for_a_name_that_is_no_checkpoint_is_left_for_a_person(tmp_path, caplog):
    storage = LocalStorage(tmp_path)
    save_over(storage, 1, "last.ckpt")
    aside = tmp_path / ".aside-00000002-last.ckpt"
    (tmp_path / "last.ckpt").rename(aside)
    storage.write_bytes("last.ckpt/optimizer.bin", b"another program's")
    assert collect_orphans(storage, keep=()) == []
    assert aside.is_dir()
    assert "being replaced" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("renames", "there"), [(0, True), (1, False)])
def test_a_prune_or_quarantine_cut_short_keeps_or_removes_the_whole(tmp_path, renames, there):
    for job in (prune, set_quarantine):
        root = tmp_path / job.__name__
        assert killed(job, root, "rename", renames) == there
        assert ("step-000000001" in next_run(root)) == there
        assert strays(root) == set() or next(iter(strays(root))).startswith(".replaced-")


@pytest.mark.slow
def test_a_prune_killed_while_it_deletes_is_finished_by_the_next_run(tmp_path):
    assert killed(prune, tmp_path, "unlink", 1)
    assert any(".trash-" in name for name in strays(tmp_path))
    assert "step-000000001" not in next_run(tmp_path)
    assert strays(tmp_path) == set()


def test_the_draft_of_somebody_who_is_writing_just_now_is_left_alone(tmp_path):
    """`ckpt pin` needs no lease, so a job that starts meanwhile must not take its draft away."""
    storage = LocalStorage(tmp_path)
    save(storage, 1)
    draft = tmp_path / ".ckpt-suite/.pins.json.0123abcd.tmp"
    draft.parent.mkdir(exist_ok=True)
    draft.write_bytes(b"half")
    with locked(storage, ".ckpt-suite/pins.json"):
        assert collect_orphans(storage, keep=()) == []
        assert draft.exists()
    assert collect_orphans(storage, keep=()) == [f".ckpt-suite/{draft.name}"]


def test_a_torn_directory_loses_its_name_before_its_files(tmp_path):
    """A job that was replaced and is about to commit it then finds nothing, instead of half of it."""
    storage = LocalStorage(tmp_path)
    torn = tmp_path / ".incomplete-0123abcd-step-000000005"
    torn.mkdir()
    (torn / "COMMITTED").write_bytes(b"x")
    seen = []
    real = os.unlink

    def watched(path, **options):
        seen.append(torn.exists())
        real(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", watched)
        assert collect_orphans(storage, keep=()) == [torn.name]
    assert seen == [False]


def test_two_at_once_lose_neither_pin_nor_mark(tmp_path):
    storage = LocalStorage(tmp_path)
    for step in range(1, 9):
        save(storage, step)

    def change(steps):
        for step in steps:
            Catalog(storage).pin(step, "kept")
            Catalog(storage).mark_damaged(f"step-{step:09d}", "a bit")

    threads = [threading.Thread(target=change, args=(range(first, 9, 2),)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(Catalog(storage).pins()) == list(range(1, 9))
    assert [info.damaged for info in Catalog(storage).committed()] == ["a bit"] * 8


def test_a_lock_that_is_never_given_back_ends_in_an_error_that_says_so(tmp_path):
    storage = LocalStorage(tmp_path)
    with (
        locked(storage, ".ckpt-suite/pins.json"),
        pytest.raises(TimeoutError, match=r"this very process has held the lock .*pins\.json"),
        locked(storage, ".ckpt-suite/pins.json", patience_seconds=0),
    ):
        pass
