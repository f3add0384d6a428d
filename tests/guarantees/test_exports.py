"""`export=`: what is due is written behind the training, whatever happens, and the training never waits."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from ckpt_core import CheckpointManager, ConfigError, EverySteps, Export, KeepBest, KeepLatest, Upload
from ckpt_core.commit import Catalog
from ckpt_core.storage import LocalStorage
from ckpt_core.telemetry import InMemorySink
from ckpt_core.tiers import read_exports
from tests.guarantees.export_jobs import dies, job
from tests.kit.memory import MemoryStorage
from tests.kit.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.fixture(autouse=True)
def _by_a_writer_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ckpt_core.manager._EXPORTER", "tests.guarantees.export_writers:write")
    (tmp_path / "say").mkdir()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


class Run:
    """A root, a place of exports, and a word with what writes them."""

    def __init__(self, home: Path) -> None:
        self.root, self.place, self.hold, self.fail = (
            home / each for each in ("root", "place", "say/hold", "say/fail")
        )
        self._begun = home / "say" / "begun"

    def manager(self, *, keep=None, save=None, sinks=(), **export) -> CheckpointManager:
        made = Export(to="hf", place=self.place, **export)
        return CheckpointManager(self.root, export=made, keep=keep, save=save, sinks=sinks)

    @property
    def steps(self) -> list[int]:
        """The exports that are whole, in their order."""
        return [int(name[5:]) for name in read_exports(LocalStorage(self.place))[0]]

    @property
    def begun(self) -> list[str]:
        return [each.split()[1] for each in self._begun.read_text().splitlines()]

    def await_begun(self, count: int) -> int:
        """Wait until so many were begun; return the process of the last one."""
        until = time.monotonic() + 60
        while not self._begun.exists() or len(self.begun) < count:
            assert time.monotonic() < until, "it was not begun"
            time.sleep(0.01)
        return int(self._begun.read_text().splitlines()[-1].split()[0])

    def await_steps(self, *steps: int) -> None:
        until = time.monotonic() + 60
        while self.steps != list(steps):
            assert time.monotonic() < until, f"{self.steps} are there"
            time.sleep(0.01)

    def words(self, step: int) -> dict[str, object]:
        return json.loads((self.place / f"step-{step:09d}" / "words.json").read_text())


def save(manager: CheckpointManager, *steps: int, **metrics: float) -> None:
    for step in steps:
        manager.save(step, {"w": torch.full((100,), float(step))}, metrics=metrics).result(60)


def exporting() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children():
        try:
            if "_export_service" in " ".join(each.cmdline()):
                found.append(each)
        except psutil.Error:
            continue
    return found


def test_the_last_checkpoint_is_exported_at_the_end_by_a_process_with_the_words_of_the_option(run):
    sink = InMemorySink()
    with run.manager(dtype="bf16", like="some/dir", adapters="merge", sinks=[sink]) as manager:
        save(manager, 1, 2, 3)
        assert not run.place.exists()
    assert run.steps == [3]
    assert run.begun == ["step-000000003"]
    words = {"to": "hf", "dtype": "bf16", "like": str(Path("some/dir").absolute()), "adapters": "merge"}
    assert run.words(3) == words | {"storage_options": {}, "out_storage_options": {}}
    assert not exporting()
    (span,) = sink.finished("export")
    assert (span.attributes["step"], span.attributes["to"]) == (3, str(run.place))


def test_the_last_checkpoint_is_in_its_tier_before_the_end_waits_for_its_export(run, tmp_path):
    sink, export = InMemorySink(), Export(to="hf", place=run.place)
    upload = Upload(tmp_path / "tier", every=100)
    with CheckpointManager(run.root, export=export, upload=upload, sinks=[sink]) as manager:
        save(manager, 1)
    ended = [each.name for each in sink.events if each.phase == "finished"]
    assert [name for name in ended if name in {"upload", "export"}] == ["upload", "export"]


def test_it_runs_in_one_process_that_gives_way_while_the_training_goes_on(run):
    run.hold.touch()
    with run.manager(when={"every": 1}) as manager:
        save(manager, 1)
        pid = run.await_begun(1)
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        group = Path(f"/proc/{pid}/autogroup")  # of sessions, which Linux may weigh first
        assert not group.exists() or int(group.read_text().split()[-1]) == 19
        assert psutil.Process(pid).environ()["OMP_NUM_THREADS"] == "1"
        save(manager, 2)  # nobody waits
        run.hold.unlink()
        run.await_steps(1, 2)
        save(manager, 3)
        assert run.await_begun(3) == pid
    assert run.steps == [1, 2, 3]
    assert not psutil.pid_exists(pid)


def test_the_newest_wins_and_what_is_written_or_next_is_not_pruned(run):
    run.hold.touch()
    with run.manager(when={"every": 1}, keep=KeepLatest(1)) as manager:
        save(manager, 1)
        run.await_begun(1)
        save(manager, 2, 3, 4)
        manager.wait()
        assert [info.step for info in manager.checkpoints()] == [1, 4]
        run.hold.unlink()
    assert run.steps == [1, 4]
    assert [info.step for info in Catalog(LocalStorage(run.root)).committed()] == [4]


def test_every_nth_is_counted_over_restarts(run):
    for first in (1, 4):
        with run.manager(when={"every": 2}, save=EverySteps(1)) as manager:
            manager.resume({"w": torch.zeros(100)})
            for step in range(first, first + 3):
                manager.maybe_save(step, {"w": torch.zeros(100)}).result(60)
                if step % 2 == 0:
                    run.await_steps(*range(2, step + 1, 2))
    assert run.steps == [2, 4, 6]


def test_the_best_is_the_best_of_the_retention_policy(run):
    with run.manager(when="best", keep=KeepBest("loss") | KeepLatest(1)) as manager:
        for step, loss in enumerate((3.0, 2.0, 5.0, 1.0), start=1):
            save(manager, step, loss=loss)
            run.await_begun({3.0: 1, 2.0: 2, 5.0: 2, 1.0: 3}[loss])
    assert run.begun == ["step-000000001", "step-000000002", "step-000000004"]
    with run.manager(when="best", keep=KeepBest("loss", mode="max") | KeepLatest(1)) as manager:
        manager.resume({"w": torch.zeros(100)})
        save(manager, 5, loss=0.5)
    assert run.begun[3:] == []  # step 4, which is there already, is the best by far


def test_only_so_many_stay_and_nothing_that_is_not_an_export_is_touched(run):
    (run.place / "mine").mkdir(parents=True)
    (run.place / "step-000000099").mkdir()
    with run.manager(when={"every": 1}, keep=KeepLatest(5)) as manager:
        manager_keep(run, manager)
    with CheckpointManager(
        run.root, export=Export(to="hf", place=run.place, when="final", keep=2)
    ) as manager:
        manager.resume({"w": torch.zeros(100)})
        save(manager, 4)
    assert run.steps == [3, 4]
    assert sorted(each.name for each in run.place.iterdir()) == [
        *("exports.json", "mine", "step-000000003", "step-000000004", "step-000000099")
    ]


@pytest.mark.parametrize("kind", ["a directory", "a file"])
def test_what_has_the_name_of_an_export_and_is_none_is_never_deleted(run, caplog, kind):
    """Neither by the export that it is in the way of, nor by those after it."""
    theirs = run.place / "step-000000002"
    theirs.mkdir(parents=True)
    mine = theirs / "mine"
    mine.write_text("mine")
    if kind == "a file":
        content = mine.rename(run.place / "moved")
        theirs.rmdir()
        mine = content.rename(theirs)
    with run.manager() as manager:
        save(manager, 2)
    assert "step 2 was not exported" in caplog.text
    assert "is no export of ours" in caplog.text
    assert (run.steps, mine.read_text()) == ([], "mine")
    with run.manager(keep=None) as manager:
        manager.resume({"w": torch.zeros(100)})
        save(manager, 3)
    assert (run.steps, mine.read_text()) == ([3], "mine")


def manager_keep(run: Run, manager: CheckpointManager) -> None:
    for step in (1, 2, 3):
        save(manager, step)
        run.await_steps(*range(1, step + 1))


def test_a_step_that_was_trained_again_is_exported_again(run):
    with run.manager() as manager:
        save(manager, 1, 2)
    with run.manager() as manager:
        manager.load({"w": torch.zeros(100)}, step=1)
        shutil.rmtree(run.root / "step-000000002")
        manager.save(2, {"w": torch.full((100,), 7.0)}).result(60)
    assert run.steps == [2]
    assert run.begun == ["step-000000002"] * 2


def test_an_error_is_told_once_and_fails_neither_saves_nor_later_exports(run, caplog):
    run.fail.write_text("the place is full")
    sink = InMemorySink()
    with run.manager(when={"every": 1}, sinks=[sink]) as manager:
        save(manager, 1)
        run.await_begun(1)
        until = time.monotonic() + 60
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
        run.fail.unlink()
        save(manager, 2)
    assert run.steps == [2]
    (told,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert f"step 1 was not exported to {run.place}" in told.getMessage()
    assert "the place is full" in told.getMessage()
    assert [each.attributes["step"] for each in sink.events if each.phase == "failed"] == [1]


def test_a_place_that_cannot_be_reached_is_told_and_harms_nothing(run, caplog):
    run.place.write_text("a file is in the way")
    with run.manager() as manager:
        save(manager, 1)
    assert f"step 1 was not exported to {run.place}" in caplog.text
    with CheckpointManager(run.root) as manager:
        assert manager.resume({"w": torch.zeros(100)}) == 1


def test_a_process_that_was_killed_is_told_and_the_next_export_has_another_one(run, caplog):
    run.hold.touch()
    with run.manager(when={"every": 1}) as manager:
        save(manager, 1)
        process, draft = run.await_begun(1), run.place / ".step-000000001.export~"
        until = time.monotonic() + 60
        while not draft.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(process, signal.SIGKILL)
        while "exit code -9" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert run.steps == []
        assert draft.exists()
        run.hold.unlink()
        save(manager, 2)
    assert run.steps == [2]
    assert sorted(each.name for each in run.place.iterdir()) == ["exports.json", "step-000000002"]


def test_the_end_waits_until_its_deadline_kills_the_process_and_says_what_is_left(run, caplog):
    run.hold.touch()
    with run.manager(deadline_seconds=0.5) as manager:
        save(manager, 1)
    assert "step 1 is not exported" in caplog.text
    assert not exporting()
    run.hold.unlink()
    with run.manager() as manager:
        manager.resume({"w": torch.zeros(100)})
    assert run.steps == [1]


def test_after_an_exception_nothing_is_waited_for(run):
    run.hold.touch()
    manager = run.manager(when={"every": 1})
    save(manager, 1)
    run.await_begun(1)
    manager.__exit__(KeyError, KeyError(), None)
    assert not exporting()
    assert run.steps == []


@pytest.mark.distributed
def test_the_process_ends_with_a_killed_job_and_the_next_run_exports_what_was_due_once(run):
    run.hold.touch()
    run_ranks(dies, 1, str(run.root.parent), timeout_seconds=100, expect_death=[0])
    pid = run.await_begun(1)
    until = time.monotonic() + 30
    while psutil.pid_exists(pid):
        assert time.monotonic() < until, "the process has outlived its parent"
        time.sleep(0.02)
    assert run.steps == []
    run.hold.unlink()
    for _ in range(2):
        with run.manager(when={"every": 1}) as manager:
            manager.resume({"w0": torch.zeros(100)})
    assert run.steps == [1]
    assert run.begun == ["step-000000001"] * 2


@pytest.mark.parametrize(
    ("root", "words", "told"),
    [
        (MemoryStorage("m"), {}, "cannot read"),
        ("root", {"place": "memory://there"}, "memory:// is in this process alone"),
        ("root", {"place": "root"}, "is the root"),
        ("root", {"when": "best"}, "needs keep=KeepBest"),
        ("root", {"when": "sometimes"}, "when must be"),
        ("root", {"when": {"every": 0}}, "every must be"),
        ("root", {"when": {"each": 2}}, "when must be"),
        ("root", {"keep": 0}, "keep must be"),
        ("root", {"dtype": "int8"}, "dtype must be"),
        ("root", {"to": "onnx"}, "to must be one of"),
        ("root", {"place": "nowhere://there"}, "nowhere"),
    ],
)
def test_what_cannot_work_is_refused_when_the_manager_is_made(tmp_path, monkeypatch, root, words, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=told):
        CheckpointManager(root, export={"to": "hf", "place": "exports", **words})


def test_two_exports_to_one_place_are_refused(tmp_path):
    one, other = Export(to="hf", place=tmp_path / "x"), Export(to="hf", place=tmp_path / "x", when="final")
    with pytest.raises(ConfigError, match=f"two have the place {tmp_path}/x"):
        CheckpointManager(tmp_path / "root", export=[one, other])


def test_a_list_of_exports_that_somebody_has_changed_is_refused_and_nothing_deleted(run, caplog):
    with run.manager() as manager:
        save(manager, 1)
    record = run.place / "exports.json"
    record.write_text(record.read_text().replace("step-000000001", "step-000000002"))
    with run.manager() as manager:
        manager.resume({"w": torch.zeros(100)})
        save(manager, 2)
    assert "exports.json" in caplog.text
    assert (run.place / "step-000000001").exists()


@pytest.mark.distributed
@pytest.mark.parametrize("victim", [None, 1])
def test_all_ranks_wait_for_the_coordinator_which_waits_for_none(tmp_path, victim):
    (tmp_path / "say" / "hold").touch()
    dead = [] if victim is None else [victim]
    found = run_ranks(job, 2, str(tmp_path), victim, timeout_seconds=100, expect_death=dead)
    ended = (["step-000000001"], [])
    assert found == [ended, None if dead else ended]


def test_ranks_must_be_given_the_same_export():
    from ckpt_core.options import CheckpointOptions, difference, given_options

    given = [
        given_options(CheckpointOptions.from_mapping({"export": {"to": "hf", "place": "/p", "when": when}}))
        for when in ("best", "final")
    ]
    assert "export" in difference(given)
