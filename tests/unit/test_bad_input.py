"""What a person can get wrong: each is one clear error, before anything is written or touched."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from torch import nn

from ckpt_core import CheckpointManager, CheckpointOptions, KeepLatest, TrainState
from ckpt_core.commit import Manifest, Marker, verify
from ckpt_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    RootBusyError,
    SaveError,
)
from ckpt_core.names import OWN, SPARES, drafted, is_run_file
from ckpt_core.root import _ownership
from ckpt_core.storage import LocalStorage, Space, object_storage
from ckpt_core.testing import Fault, FaultyStorage

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
LOCK_FILE = (
    ".ckpt-suite/writer.json.lock"  # stays behind on purpose: a lock file that goes away excludes nobody
)


def train_state(seed=0, *, width=3, dtype=torch.float32, bias=True):
    """A model that has been trained for a step, so that the optimizer has something to lose."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width, bias=bias, dtype=dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer)


def live(state):
    """Everything that training depends on, as values."""
    return plain(
        {
            "model": dict(state.model.state_dict()),
            "optimizers": [optimizer.state_dict() for optimizer in state.optimizers],
            "identity": [id(parameter) for parameter in state.model.parameters()],
            "rng": [torch.get_rng_state(), random.getstate(), [str(part) for part in np.random.get_state()]],
        }
    )


def plain(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def tree(root):
    """Every file below `root` with its content, but for what the journal writes meanwhile."""
    if root.is_file():
        return root.read_bytes()
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
        if not {path.name, drafted(path.name)} & {OWN, Path(LOCK_FILE).name, *SPARES}
        and not is_run_file(drafted(path.name) or path.name)
    }


@contextmanager
def untouched(root, state):
    """Nothing on disk and nothing that lives changes inside the block."""
    files, values = tree(root), live(state)
    yield
    assert tree(root) == files
    assert live(state) == values


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A root with steps 1 and 2, to be copied."""
    root = tmp_path_factory.mktemp("history") / "run"
    with CheckpointManager(root) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, train_state(step))
    return root


@pytest.fixture
def run(history, tmp_path):
    return Path(shutil.copytree(history, tmp_path / "run"))


def change_marker(root, step, **fields):
    path = root / f"step-{step:09d}" / "COMMITTED"
    marker = Marker.from_bytes(path.read_bytes())
    known = {name: getattr(marker, name) for name in Marker.__dataclass_fields__}
    path.write_bytes(Marker(**{**known, **fields}).to_bytes())


# --- the root -----------------------------------------------------------------------------------------------


def test_a_root_that_is_a_file_is_refused(tmp_path):
    root, state = tmp_path / "run", train_state()
    root.write_text("precious")
    with untouched(root, state), CheckpointManager(root) as checkpoints:
        for act in (lambda: checkpoints.save(1, state), lambda: checkpoints.resume(state)):
            with pytest.raises(ConfigError, match=rf"{root}.*a file is where.*[Cc]hoose a directory"):
                act()


def test_a_root_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("precious")
    root, state = tmp_path / "file" / "run", train_state()
    refusal = pytest.raises(ConfigError, match=f"{root}.*a file is where")
    with untouched(tmp_path, state), CheckpointManager(root) as checkpoints, refusal:
        checkpoints.save(1, state)


def test_a_root_that_cannot_be_written_is_refused(run):
    state = train_state()
    refusal = pytest.raises(ConfigError, match=rf"{run}.*check owner, mode and mount.*this job may write to")
    with untouched(run, state), unwritable(run), CheckpointManager(run) as checkpoints, refusal:
        checkpoints.save(3, state)


@contextmanager
def unwritable(root):
    """Root's right to write everywhere is taken away too."""
    user = os.geteuid()
    root.chmod(0o555)
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)
    root.chmod(0o755)


def test_an_s3_root_without_the_extra_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(ConfigError, match=r's3://bucket/run.*pip install "ckpt-suite\[s3\]"'):
        CheckpointManager("s3://bucket/run")


@pytest.mark.parametrize(
    ("url", "size"), [("s3://bucket/run", 2**20), ("memory://run", 0), ("s3://b/r", "5")]
)
def test_parts_that_no_store_takes_are_refused_at_the_start(url, size):
    with pytest.raises(ConfigError, match="write_block_bytes"):
        CheckpointManager(url, storage_options={"write_block_bytes": size})


# --- options and arguments ----------------------------------------------------------------------------------


def test_unknown_options_in_yaml_are_all_named_with_the_nearest_known(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("checkpoint:\n  sve: {every_steps: 5}\n  keep: {latst: 3}\n  verify: maybe\n")
    with pytest.raises(ConfigError) as caught:
        CheckpointOptions.from_file(file)
    for part in (str(file), "'sve' (did you mean 'save'?)", "'latst' (did you mean 'latest'?)", "verify"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"step": -1}, "step must be a whole number of at least 0, not -1"),
        ({"step": "3"}, "step must be a whole number"),
        ({"step": True}, "step must be a whole number"),
        ({"metrics": {"loss": "low"}}, "metrics of step 3 must be numbers"),
        ({"metrics": {"loss": torch.ones(2)}}, "metrics of step 3 must be numbers"),
        ({"annotations": {"model": {1}}}, "annotations of step 3 must be plain JSON"),
        ({"annotations": {"x": float("nan")}}, "annotations of step 3 must be plain JSON"),
        ({"name": "../outside"}, "'../outside' cannot be the name of a checkpoint"),
        ({"name": ""}, "'' cannot be the name"),
        ({"name": ".ckpt-suite"}, "'.ckpt-suite' cannot be the name"),
        ({"name": ".trash-0123abcd-x"}, "cannot be the name"),
        ({"name": "COMMITTED"}, "'COMMITTED' cannot be the name"),
        ({"name": "step-000000009"}, "'step-000000009' is the name of step 9"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_before_anything_is_written(run, arguments, told):
    state = train_state()
    with untouched(run, state), CheckpointManager(run) as checkpoints:
        with pytest.raises(ConfigError) as caught:
            checkpoints.save(**{"step": 3, "state": state, **arguments})
        assert told in str(caught.value)


def test_a_metric_that_is_a_tensor_of_one_element_is_a_number(run):
    with CheckpointManager(run) as checkpoints:
        checkpoints.save(3, train_state(), metrics={"loss": torch.tensor(0.5)}).result()
        assert checkpoints.latest().metrics == {"loss": 0.5}


@pytest.mark.parametrize("state", [None, 3, "model.pt", nn.Linear])
def test_what_is_no_training_state_is_refused(run, state):
    with untouched(run, train_state()), CheckpointManager(run) as checkpoints:
        for act in (lambda: checkpoints.save(3, state), lambda: checkpoints.resume(state)):
            with pytest.raises(ConfigError, match=r"TrainState\(model="):
                act()


def test_a_committed_step_is_not_saved_again(run):
    state = train_state()
    refusal = pytest.raises(CheckpointExistsError, match=f"{run}/step-000000002 is committed already")
    with CheckpointManager(run) as checkpoints:
        assert checkpoints.resume(state) == 2
        with untouched(run, state), refusal:
            checkpoints.save(2, state)


# --- a full disk --------------------------------------------------------------------------------------------

CHANGES = {"check_root", "replace", "make_directory", "create", "write", "close", "sync_directory", "rename"}


def operations_of_a_save(root):
    storage = FaultyStorage(LocalStorage(root))
    # The journal has a thread of its own, whose operations would be counted among these at random.
    with CheckpointManager(storage, journal=False) as checkpoints:
        checkpoints.save(3, train_state(3)).result()
        return storage.operations


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_moment_of_a_save_costs_that_save_only(history, tmp_path):
    rehearsed = operations_of_a_save(shutil.copytree(history, tmp_path / "rehearsal"))
    last_change = max(op.number for op in rehearsed if op.method == "rename")
    # The record of the owner is of no need: the lock is what protects.
    changes = [op for op in rehearsed if op.method in CHANGES and op.key != ".ckpt-suite/writer.json"]
    numbers = [op.number for op in changes if op.number <= last_change]
    assert len(numbers) > 20
    for number in numbers:
        root = Path(shutil.copytree(history, tmp_path / f"full-at-{number}"))
        state = train_state(3)
        storage = FaultyStorage(LocalStorage(root), [Fault(nth=number, error=FULL)])
        with untouched(root, state):
            checkpoints = CheckpointManager(storage, journal=False)
            with pytest.raises((SaveError, ConfigError), match=r"(?i)free space there") as caught:
                save_and_wait(checkpoints, 3, state)
            assert str(root) in str(caught.value), rehearsed[number]
            close_quietly(checkpoints)
        with CheckpointManager(root) as checkpoints:
            assert checkpoints.resume(train_state()) == 2
            checkpoints.save(3, state).result()
            assert [info.step for info in checkpoints.checkpoints()] == [1, 2, 3]
            assert checkpoints.verify() == []


def save_and_wait(checkpoints, step, state):
    checkpoints.save(step, state).result()


def close_quietly(checkpoints):
    """The failure is delivered once more by `close`, for those who never looked at the handle."""
    try:
        checkpoints.close()
    except SaveError as error:
        assert "free space" in str(error)  # noqa: PT017


def test_the_step_that_failed_can_be_tried_again_on_the_same_manager(run):
    storage = FaultyStorage(LocalStorage(run), [Fault(method="close", key="*.distcp", nth=0, error=FULL)])
    state = train_state(3)
    with CheckpointManager(storage, on_error="warn") as checkpoints:
        with pytest.raises(SaveError, match="phase write"):
            checkpoints.save(3, state).result()
        assert checkpoints.save(3, state).result().step == 3
        assert checkpoints.verify(3) == []


def test_a_job_that_only_warns_trains_on_through_every_failure(run, caplog):
    faults = [
        Fault(method="make_directory", nth=0, error=FULL),
        Fault(method="create", key="*/COMMITTED", nth=0, error=FULL),
    ]
    with CheckpointManager(FaultyStorage(LocalStorage(run), faults), on_error="warn") as checkpoints:
        assert checkpoints.resume(train_state()) == 2
        checkpoints.save(3, train_state(3))
        checkpoints.save(4, train_state(4))
        checkpoints.wait()
        checkpoints.save(5, train_state(5))
        checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 2, 5]
    assert "training continues without the checkpoint of step 3" in caplog.text
    assert "training continues without the checkpoint of step 4" in caplog.text


@pytest.fixture
def tiny_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("foreseen", "told"),
    [
        (True, r"\(phase open\).*takes 4.*Nothing was written"),
        (False, r"\(phase write\).*No space left.*free space there"),
    ],
    ids=["and says so", "and does not say so, as under a quota"],
)
def test_a_disk_that_is_really_full_costs_that_save_only(tiny_disk, monkeypatch, foreseen, told):
    if not foreseen:
        monkeypatch.setattr(LocalStorage, "space", lambda _: Space())
    root, big = tiny_disk / "run", {"x": torch.zeros(1 << 20)}
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, train_state(1)).result()
        before = tree(root)
        with pytest.raises(SaveError, match=rf"{root} {told}"):
            checkpoints.save(2, big).result()
        assert tree(root) == before
        checkpoints.wait()
        checkpoints.save(2, train_state(2)).result()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 2]
        assert checkpoints.verify() == []


# --- two jobs -----------------------------------------------------------------------------------------------

HOLDER = textwrap.dedent("""
    import sys, torch
    from ckpt_core import CheckpointManager
    with CheckpointManager(sys.argv[1]) as checkpoints:
        for step, line in enumerate(sys.stdin, start=3):
            checkpoints.save(step, {"x": torch.full((3,), float(step))}).result()
            print("saved", step, flush=True)
""")


def ask_to_save(holder):
    holder.stdin.write("save\n")
    holder.stdin.flush()
    return holder.stdout.readline().strip()


@pytest.mark.slow
def test_a_second_job_is_refused_by_name_until_the_first_is_gone(run):
    state = train_state()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert ask_to_save(holder) == "saved 3"
        named = rf"{run} is being written by .*host {socket.gethostname()}, pid {holder.pid}, .*stop it, or"
        with untouched(run, state), CheckpointManager(run) as second:
            for act in (lambda: second.save(9, state), lambda: second.resume(state), second.prune):
                with pytest.raises(RootBusyError, match=named):
                    act()
            assert second.latest().step == 3
        assert ask_to_save(holder) == "saved 4"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with CheckpointManager(run) as second:
            second.save(9, state).result()
            assert [info.step for info in second.checkpoints(abandoned=True)] == [1, 2, 3, 4, 9]
    finally:
        holder.kill()
        holder.communicate()


def test_two_managers_of_one_process_do_not_share_a_root(run):
    with CheckpointManager(run) as first, CheckpointManager(run) as second:
        first.save(3, train_state()).result()
        second.save(4, train_state()).result()
        with pytest.raises(ConfigError, match=f"{run} belongs to another CheckpointManager of this process"):
            first.save(5, train_state())


@pytest.fixture
def bucket():
    url = f"memory://bad-input-{random.getrandbits(64):x}"
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True)


def in_another_process():
    """Let managers that are made from now on know nothing of earlier ones of this process."""
    _ownership._held.clear()


def test_on_an_object_store_the_newer_job_fences_the_older_at_its_next_save(bucket):
    older, newer = CheckpointManager(bucket), CheckpointManager(bucket)
    older.save(1, train_state(1)).result()
    in_another_process()
    assert newer.resume(train_state()) == 1
    newer.save(2, train_state(2)).result()
    with pytest.raises(
        RootBusyError, match=rf"{bucket} no longer belongs .*taken over by .*pid {os.getpid()}"
    ):
        older.save(3, train_state(3)).result()
    newer.save(3, train_state(3)).result()
    older.close()
    newer.save(4, train_state(4)).result()
    assert [info.step for info in newer.checkpoints()] == [1, 2, 3, 4]
    newer.close()


def test_a_fenced_job_leaves_the_same_step_of_the_newer_one_alone(bucket):
    """Both write step 5 under the same keys; when the older one finds out, the newer one is midway."""
    reached, midway, go_on, finish = (threading.Event() for _ in range(4))
    slow = Fault(method="create", key="*/.metadata", before=lambda _: (reached.set(), go_on.wait(60)))
    older = CheckpointManager(FaultyStorage(object_storage(bucket), [slow]))
    pause = Fault(method="create", key="*/COMMITTED", before=lambda _: (midway.set(), finish.wait(60)))
    newer = CheckpointManager(FaultyStorage(object_storage(bucket), [pause]))
    fenced = older.save(5, train_state(0))
    assert reached.wait(60)
    in_another_process()
    winner = newer.save(5, train_state(5))
    assert midway.wait(60)
    go_on.set()
    with pytest.raises(CheckpointError):
        fenced.result(60)
    finish.set()
    assert winner.result(60).step == 5
    assert verify(newer.storage, "step-000000005") == []
    newer.close()
    older.close()


# --- what is on disk ----------------------------------------------------------------------------------------


def test_a_newer_format_is_not_passed_over_and_asks_for_an_upgrade(run):
    change_marker(run, 2, format_version=4)
    state = train_state()
    with untouched(run, state), CheckpointManager(run) as checkpoints:
        loads = [
            lambda: checkpoints.resume(state),
            lambda: checkpoints.load(state),
            lambda: checkpoints.load(state, step=2),
            lambda: checkpoints.load(state, name="step-000000002"),
        ]
        for load in loads:
            told = rf"{run}/step-000000002.*newer ckpt-suite \(format 4\).*upgrade ckpt-suite"
            with pytest.raises(IncompatibleCheckpointError, match=told):
                load()


def test_a_checkpoint_of_an_older_format_is_called_that_and_never_damaged(run, caplog):
    change_marker(run, 2, format_version=1)
    (run / "step-000000002" / "chunks-00000.json.z").rename(run / "step-000000002" / "chunks-00000.json")
    state = train_state()
    told = r"is of an older format \(1\), not readable by this version of ckpt-suite"
    with untouched(run, state), CheckpointManager(run) as checkpoints:
        loads = [
            lambda: checkpoints.resume(state),
            lambda: checkpoints.load(state),
            lambda: checkpoints.load(state, step=2),
            lambda: checkpoints.load(state, name="step-000000002"),
        ]
        for load in loads:
            with pytest.raises(IncompatibleCheckpointError, match=rf"{run}/step-000000002.*{told}"):
                load()
        (failure,) = verify(checkpoints.storage, "step-000000002")
    assert re.search(told, str(failure))
    assert "damaged" not in f"{failure} {caplog.text}"
    assert not (run / ".ckpt-suite/damaged.json").exists()


def test_a_manifest_of_an_older_format_is_called_that_without_its_marker():
    content = json.dumps({"format_version": 1, "files": "of another shape"}).encode()
    for read in (Manifest.from_bytes, partial(Manifest.from_bytes, with_files=False)):
        with pytest.raises(IncompatibleCheckpointError, match="of an older format"):
            read(content)


@pytest.mark.parametrize("version", [1, 4], ids=["older", "newer"])
def test_an_old_checkpoint_of_another_format_is_no_obstacle(run, version):
    change_marker(run, 1, format_version=version)
    with CheckpointManager(run) as checkpoints:
        assert checkpoints.resume(train_state()) == 2


@pytest.mark.parametrize("content", [b"", b"COMMITTED\n", b"{}", b'{"format_version":1,"step":2}'], ids=repr)
def test_a_foreign_marker_is_no_checkpoint_and_never_loaded(run, content):
    (run / "step-000000002" / "COMMITTED").write_bytes(content)
    state = train_state()
    with CheckpointManager(run) as checkpoints:
        with untouched(run, state), pytest.raises(CorruptCheckpointError, match=f"{run}/step-000000002"):
            checkpoints.load(state, step=2)
        assert checkpoints.resume(state) == 1


def test_a_torn_directory_is_never_loaded_and_makes_no_trouble(run):
    torn = run / ".incomplete-0123abcd-step-000000003"
    shutil.copytree(run / "step-000000002", torn)
    (torn / "COMMITTED").unlink()
    state = train_state()
    with CheckpointManager(run) as checkpoints:
        with untouched(run, state):
            for choice in ({"step": 3}, {"name": torn.name}):
                with pytest.raises(CheckpointNotFoundError, match=rf"{run}.*committed steps there: 1, 2"):
                    checkpoints.load(state, **choice)
        assert checkpoints.resume(state) == 2
        assert not torn.exists()
        checkpoints.save(3, state).result()


def test_a_directory_that_is_not_ours_is_never_overwritten(run):
    (run / "step-000000003").mkdir()
    (run / "step-000000003" / "notes.txt").write_text("precious")
    state = train_state()
    with CheckpointManager(run) as checkpoints:
        checkpoints.save(3, state).result()
        assert checkpoints.resume(state) == 3
    assert (run / "step-000000003" / "notes.txt").read_text() == "precious"


def test_nothing_to_load_is_said_as_such(tmp_path):
    root, state = tmp_path / "run", train_state()
    with CheckpointManager(root) as checkpoints:
        with pytest.raises(CheckpointNotFoundError, match=f"nothing has been committed to {root} yet"):
            checkpoints.load(state)
        assert not root.exists()
        assert checkpoints.resume(state) is None


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: train_state(bias=False), r"the training state lacks: .*model\.0\.bias"),
        (lambda: train_state(width=5), r"0\.weight.*shape \(5, 4\) here, \(3, 4\) in the checkpoint"),
        (lambda: train_state(dtype=torch.float64), r"float64 here, torch\.float32 in the checkpoint"),
        (
            lambda: TrainState(model=nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))),
            r"the checkpoint lacks: model\.1\.weight, model\.1\.bias",
        ),
        (
            lambda: TrainState(model=nn.ModuleDict({"other": nn.Linear(4, 3)})),
            r"the checkpoint lacks: model\.other\.weight, model\.other\.bias",
        ),
        (lambda: TrainState(model=nn.Linear(4, 3), ema=nn.Linear(4, 3)), r"no ema"),
    ],
    ids=["unexpected", "mis-shaped", "other dtype", "missing", "another model", "missing item"],
)
def test_the_checkpoint_of_another_model_is_refused_whole(run, make, told):
    state = make()
    told = f"{run}/step-000000002 does not fit.*nothing was loaded.*{told}.*items="
    with untouched(run, state), CheckpointManager(run, keep=KeepLatest(1)) as checkpoints:
        for load in (lambda: checkpoints.load(state, step=2), lambda: checkpoints.resume(state)):
            with pytest.raises(IncompatibleCheckpointError, match=told) as caught:
                load()
            assert caught.value.missing or caught.value.unexpected or caught.value.mismatched
