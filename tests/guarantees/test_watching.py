"""Who waits for checkpoints gets whole ones of this run, keeps them in use, and writes numbers back."""

from __future__ import annotations

import json
import logging
import math
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ckpt_core
from ckpt_core import (
    CheckpointManager,
    CheckpointNotFoundError,
    ConfigError,
    KeepBest,
    KeepLatest,
    annotate,
    watch,
)
from ckpt_core.cli import main
from ckpt_core.commit import Catalog, Inventory, _catalog, in_use, note_measured, read_notes
from ckpt_core.names import NOTES
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.guarantees.test_lineage import run
from tests.kit.clock import FakeClock
from tests.unit.cli.conftest import ckpt  # noqa: F401 - a fixture
from tests.unit.commit.checkpoints import bucket_like, posix_like, save, save_over


@pytest.fixture(params=[posix_like, bucket_like])
def storage(request):
    return request.param()


def watching(storage, **options):
    return watch(storage, poll=0.01, timeout=0.05, **options)


def steps(watcher):
    return [found.step for found in watcher]


def noted(storage, kind):
    return [entry.name for entry in storage.list(NOTES) if entry.name.startswith(kind)]


def prune(storage, keep):
    with CheckpointManager(storage, keep=keep) as manager:
        manager.continue_from()
        manager.prune()
    return [info.step for info in Catalog(storage).committed()]


def test_the_newest_comes_and_then_what_is_newer(storage):
    save(storage, 1), save(storage, 2)
    found = watching(storage)
    first = next(found)
    assert (first.step, first.info.step) == (2, 2)
    assert first.path.startswith(storage.url)
    assert first.path.endswith("/step-000000002")
    save(storage, 3), save(storage, 4)
    assert steps(found) == [4]


def test_each_comes_in_turn_after_a_step(storage):
    for step in range(1, 5):
        save(storage, step)
    found = watching(storage, each=True, after=1)
    assert [next(found).step, next(found).step] == [2, 3]
    save(storage, 5)
    assert steps(found) == [4, 5]


def test_after_a_rewind_the_new_lineage_comes_and_the_old_one_does_not(storage):
    run(storage, 100, 200, 300)
    found = watching(storage, each=True)
    assert [next(found).step for _ in range(3)] == [100, 200, 300]
    run(storage, 150, 200, go_back_to=100)
    assert [next(found).step, next(found).step] == [150, 200]
    run(storage, 250, resume=True)
    assert next(found).step == 250
    run(storage, 7)
    assert steps(found) == [7]


def test_a_name_that_is_saved_again_is_seen_each_time():
    storage = posix_like()
    save(storage, 1, name="last")
    found = watching(storage)
    assert next(found).step == 1
    save_over(storage, 2, "last")
    assert steps(found) == [2]


def test_what_is_bad_or_damaged_is_passed_over(storage, caplog):
    for step in range(1, 5):
        save(storage, step)
    Catalog(storage).mark_bad("step-000000004", "diverged")
    storage.delete("step-000000003/__1_0.distcp")
    with caplog.at_level(logging.WARNING):
        assert steps(watching(storage)) == [2]
    assert "step-000000003 is passed over: __1_0.distcp: missing" in caplog.text
    assert caplog.text.count("passed over") == 1
    assert noted(storage, "in-use") == []


def test_a_watcher_waits_for_a_root_that_is_not_there_yet(tmp_path):
    root, found = tmp_path / "later" / "run", []
    watcher = threading.Thread(target=lambda: found.append(next(watch(root, poll=0.01))))
    watcher.start()
    time.sleep(0.05)
    assert not root.exists()
    save(LocalStorage(root), 5)
    watcher.join(30)
    assert found[0].path == f"{root}/step-000000005"


def test_a_place_that_cannot_be_a_root_is_refused_and_not_waited_for(tmp_path):
    save(LocalStorage(tmp_path), 1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError):
        watch(tmp_path / "step-000000001")
    with pytest.raises((ConfigError, NotADirectoryError)):
        next(watch(tmp_path / "file", timeout=0.01))
    for wrong in ({"after": -1}, {"poll": 0}, {"timeout": math.nan}, {"each": "yes"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            watch(tmp_path, **wrong)


def test_what_was_handed_out_stays_until_the_next_is_asked_for(storage):
    save(storage, 1)
    found = watching(storage)
    assert next(found).step == 1
    save(storage, 2), save(storage, 3)
    assert prune(storage, KeepLatest(1)) == [1, 3]
    assert next(found).step == 3
    assert prune(storage, KeepLatest(1)) == [3]
    found.close()
    assert noted(storage, "in-use") == []


def test_a_pin_that_comes_after_a_prune_was_decided_still_counts(storage, monkeypatch, capsys):
    for step in (1, 2, 3):
        save(storage, step)
    decide, pins = Inventory.droppable, []

    def and_then_pinned(self, *arguments, **options):
        drop = decide(self, *arguments, **options)
        pins.append(in_use(storage, 1))
        pins[-1].__enter__()
        return drop

    with monkeypatch.context() as patch:
        patch.setattr(Inventory, "droppable", and_then_pinned)
        assert prune(storage, KeepLatest(1)) == [1, 3]
    pins[-1].__exit__(None, None, None)
    assert prune(storage, KeepLatest(1)) == [3]


def test_the_pin_of_a_watcher_that_was_killed_ends_by_itself(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    save(storage, 1)
    program = (
        "import sys, time\nfrom ckpt_core import watch\n"
        "for found in watch(sys.argv[1]):\n    print(found.step, flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as killed:
        assert killed.stdout.readline() == b"1\n"
        killed.send_signal(signal.SIGKILL)
    save(storage, 2)
    clock = FakeClock(time.time())
    monkeypatch.setattr(time, "time", clock)
    assert prune(storage, KeepLatest(1)) == [1, 2]
    clock.advance(_catalog.LEASE_SECONDS + 1)
    assert read_notes(storage).in_use == {}
    assert prune(storage, KeepLatest(1)) == [2]
    held = watching(storage)
    assert next(held).step == 2
    assert len(noted(storage, "in-use")) == 1  # what was left went with the checkpoint


def test_a_pin_is_renewed_while_its_process_lives_even_past_a_failure(monkeypatch, caplog):
    failing = Fault(method="create", key=NOTES + "/*", nth=1, error=OSError("a hiccup"))
    storage, clock = FaultyStorage(posix_like(), [failing]), FakeClock()
    monkeypatch.setattr(_catalog, "_RENEW_SECONDS", 0.005)
    monkeypatch.setattr(time, "time", clock)
    with in_use(storage, 7):
        (begun,) = noted(storage, "in-use")
        clock.advance(_catalog.LEASE_SECONDS - 1)
        deadline = time.monotonic() + 30
        while noted(storage, "in-use") in ([begun], []) and time.monotonic() < deadline:
            time.sleep(0.005)
        clock.advance(2)
        assert list(read_notes(storage).in_use) == [7]
    assert "a hiccup" in caplog.text
    assert noted(storage, "in-use") == []


def test_storage_that_fails_now_and_then_is_asked_again_and_not_forever(caplog):
    inner = posix_like()
    save(inner, 1)
    storage = FaultyStorage(inner, [Fault(method="list", key="", nth=0, error=OSError("a hiccup"))])
    assert steps(watching(storage)) == [1]
    assert "a hiccup" in caplog.text
    storage = FaultyStorage(inner, [Fault(method="list", key="", error=OSError("gone"))])
    with pytest.raises(OSError, match="gone"):
        next(watch(storage, poll=0.001))


def test_a_root_that_cannot_be_written_is_refused_with_the_reason():
    inner = posix_like()
    save(inner, 1)
    storage = FaultyStorage(
        inner, [Fault(method="create", key=NOTES + "/*", error=PermissionError("read-only"))]
    )
    with pytest.raises(ConfigError, match=r"cannot be pinned .* read-only"):
        next(watching(storage))


@pytest.mark.parametrize("local", [True, False])
def test_a_number_written_back_counts_for_the_running_jobs_retention(local, tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path) if local else bucket_like()
    if not local:
        monkeypatch.setattr("ckpt_core.watching.open_storage", lambda *_: storage)
    place = str(tmp_path) if local else "memory://bucket/run"
    with CheckpointManager(storage, keep=KeepBest("loss")) as manager:
        for step, loss in ((1, 5.0), (2, 6.0), (3, 4.0)):
            manager.save(step, {"w": torch.full((2,), float(step))}, metrics={"loss": loss})
            manager.wait()
            annotate(f"{place}@{step}", {"loss": float(step), "accuracy": torch.tensor(0.5)})
        manager.save(4, {"w": torch.zeros(2)})
        manager.prune()
        found = {info.step: dict(info.metrics) for info in manager.checkpoints()}
    assert found == {1: {"loss": 1.0, "accuracy": 0.5}, 4: {}}
    assert len(noted(storage, "measured")) == 2  # those of removed checkpoints went with them
    assert Catalog(storage).manifest("step-000000001").metrics == {"loss": 5.0}


def test_numbers_written_back_at_the_same_time_are_all_kept(storage):
    info = save(storage, 1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: note_measured(storage, info.save_id, {f"m{n}": float(n)}), range(24)))
    assert read_notes(storage).measured(info.save_id) == {f"m{n}": float(n) for n in range(24)}
    for value in (1.0, 2.0):
        note_measured(storage, info.save_id, {"m0": value})
    assert Catalog(storage).find(step=1).metrics["m0"] == 2.0


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"loss": math.nan},
        {"loss": math.inf},
        {"loss": "1.0"},
        {"loss": True},
        {"": 1.0},
        {3: 1.0},
        {"n" * 81: 1.0},
    ],
)
def test_what_is_no_finite_number_by_name_is_not_written(metrics, tmp_path):
    save(LocalStorage(tmp_path), 1)
    with pytest.raises(ConfigError):
        annotate(f"{tmp_path}@1", metrics)
    assert noted(LocalStorage(tmp_path), "") == []


def test_a_step_that_is_not_there_or_is_pruned_meanwhile_is_an_error(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    save(storage, 1), save(storage, 2)
    with pytest.raises(CheckpointNotFoundError, match=r"no committed step 9 .* 1, 2"):
        annotate(f"{tmp_path}@9", {"loss": 1.0})
    with pytest.raises(CheckpointNotFoundError):
        annotate(tmp_path / "step-000000009", {"loss": 1.0})

    def pruned_first(*arguments):
        prune(storage, KeepLatest(1))
        return note_measured(*arguments)

    monkeypatch.setattr("ckpt_core.watching.note_measured", pruned_first)
    with pytest.raises(CheckpointNotFoundError, match="was pruned or replaced meanwhile"):
        annotate(tmp_path / "step-000000001", {"loss": 1.0})
    assert noted(storage, "") == []


def test_files_among_the_notes_that_are_none_harm_nothing(storage):
    info = save(storage, 1)
    note_measured(storage, info.save_id, {"m": 1.0})
    (name,) = noted(storage, "measured")
    head = name.rpartition("-")[0]
    for other in ("6d=nan", "6d=1e999", "6d=x", "6=2.0", "ff=2.0", "=2.0", "6d=", "6d"):
        storage.replace(f"{NOTES}/{head[:-1]}f-{other}", b"x")
    for other in ("in-use-x", "in-use-000000001-99999999999999-0", f"in-use-9-1-{'0' * 16}", "other"):
        storage.replace(f"{NOTES}/{other}", b"x")
    (found,) = Catalog(storage).committed()
    assert (found.metrics, found.pinned) == ({**info.metrics, "m": 1.0}, None)
    storage.replace(f"{NOTES}/in-use-000000001-{10**12 - 1}-{'0' * 16}", b"")
    assert Catalog(storage).find(step=1).pinned is not None


def test_a_copy_has_the_numbers_and_no_pin_of_a_watcher(tmp_path, ckpt):  # noqa: F811
    storage = LocalStorage(tmp_path / "run")
    save(storage, 1)
    annotate(f"{tmp_path}/run@1", {"accuracy": 0.5})
    with in_use(storage, 1):
        for _ in range(2):
            assert ckpt("cp", tmp_path / "run", tmp_path / "copy")[0] == 0
    (found,) = Catalog(LocalStorage(tmp_path / "copy")).committed()
    assert (found.metrics["accuracy"], found.pinned) == (0.5, None)
    assert len(noted(LocalStorage(tmp_path / "copy"), "measured")) == 1


def test_the_command_runs_a_program_for_each_without_a_shell(tmp_path, capfd):
    for step in (1, 2):
        save(LocalStorage(tmp_path / "a run"), step)
    program = tmp_path / "evaluate.py"
    program.write_text(
        "import os, sys\nfrom ckpt_core.commit import read_notes\n"
        "from ckpt_core.storage import open_storage\n"
        "step = int(os.environ['CKPT_STEP'])\n"
        "assert step in read_notes(open_storage(os.path.dirname(os.environ['CKPT_PATH']))).in_use\n"
        "assert sys.argv[1:] == [f'{step}', os.environ['CKPT_PATH'], '$HOME;x']\nsys.exit(step == 1)\n"
    )
    words = f"{sys.executable} {program} {{step}} {{path}} '$HOME;x'"
    root = str(tmp_path / "a run")
    command = ["watch", root, "--each", "--poll", "0.01", "--timeout", "0.05", "--exec", words]
    assert main(command) == 1
    first, second = capfd.readouterr().out.splitlines()
    assert first == f"{tmp_path}/a run/step-000000001  exit code 1"
    assert second == f"{tmp_path}/a run/step-000000002  exit code 0"
    assert main([*command, "--fail-fast", "--json"]) == 1
    listed = json.loads(capfd.readouterr().out)["checkpoints"]
    assert [(each["step"], each["exit_code"]) for each in listed] == [(1, 1)]
    assert main([*command[:-1], sys.executable + " -c ''"]) == 0


def test_the_command_tells_what_is_wrong_by_its_exit_code(tmp_path, ckpt):  # noqa: F811
    save(LocalStorage(tmp_path), 1)
    code, _, error = ckpt("watch", tmp_path, "--exec", "no-such-program-here {path}")
    assert (code, "names no program" in error) == (2, True)
    code, _, error = ckpt("watch", tmp_path, "--after", "1", "--timeout", "0.01")
    assert (code, "no checkpoint came within 0.01 s" in error) == (3, True)
    assert ckpt("watch", tmp_path, "--timeout", "-1")[0] == 2
    for metric, expected in (("loss=0.5", 0), ("loss=x", 2), ("loss", 2), ("loss=nan", 2), ("=1", 2)):
        assert ckpt("annotate", f"{tmp_path}@1", "--metric", metric)[0] == expected
    assert ckpt("annotate", f"{tmp_path}@1")[0] == 2
    assert ckpt("annotate", f"{tmp_path}@2", "--metric", "loss=1")[0] == 3
    _, out, _ = ckpt("show", f"{tmp_path}@1")
    assert "metrics:     val_loss=0.5" in out
    assert "measured:    loss=0.5" in out
    assert "loss=0.5" in ckpt("ls", tmp_path)[1]


def test_watching_needs_no_torch():
    program = (
        "import sys, ckpt_core\nckpt_core.watch, ckpt_core.annotate, ckpt_core.PinnedCheckpoint\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert ckpt_core.watch is watch
