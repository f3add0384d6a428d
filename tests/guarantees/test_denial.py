"""Odd things in a root never block what is whole, never end in a traceback, and never fill the memory."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt_core import CheckpointManager
from ckpt_core.cli import main
from ckpt_core.commit import Catalog, Manifest, Marker, Owner, begin, commit, verify
from ckpt_core.commit import _catalog as files
from ckpt_core.commit import _catalog as pins
from ckpt_core.commit import _manifest as manifests
from ckpt_core.errors import (
    ArchivedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    SaveError,
)
from ckpt_core.storage import ForeignFileError, LocalStorage, object_storage, read_small
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.memory import MemoryStorage
from tests.unit.commit.checkpoints import bucket_like, manifest_of, posix_like, save

HUGE = 40 << 30
ONE, TWO = "step-000000001", "step-000000002"
OF_A_CHECKPOINT = [
    "COMMITTED",
    "manifest.json",
    ".metadata",
    "__0_0.distcp",
    "chunks-00000.json.z",
    "rank-00000.json",
]


def weights(step=0):
    return {"w": torch.full((4,), float(step)), "note": {"of": step}}


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    root = tmp_path_factory.mktemp("history") / "run"
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, weights(step))
    return root


@pytest.fixture
def run(history, tmp_path):
    return Path(shutil.copytree(history, tmp_path / "run"))


def link_out(path):
    outside = path.parents[2] / "outside"
    outside.mkdir(exist_ok=True)
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def loop(path):
    path.unlink()
    path.symlink_to(path.name)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def directory(path):
    path.unlink()
    path.mkdir()


def sparse(path):
    with path.open("ab") as file:
        file.truncate(HUGE)


def commands(root):
    """Every command that looks, in every way; each says what it has to say in lines."""
    for arguments in (
        ["ls"], ["ls", "--json"], ["show"], ["verify"], ["verify", "--all"], ["prune", "--keep-latest", "1"],
        ["prune", "--keep-latest", "1", "--dry-run"],
    ):  # fmt: skip
        yield arguments, main([*arguments, str(root)])
    for command in ("show", "verify"):
        yield [command, TWO], main([command, str(root / TWO)])


# --- what is not what it should be --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_A_CHECKPOINT)
@pytest.mark.parametrize("spoil", [link_out, loop, pipe, directory, sparse])
def test_what_is_no_file_of_ours_costs_that_checkpoint_only(run, name, spoil, capsys):
    spoil(run / TWO / name)
    state = weights()
    with CheckpointManager(run) as manager:
        with pytest.raises((CorruptCheckpointError, CheckpointNotFoundError)):
            manager.load(state, step=2)
        assert manager.resume(state) == 1
        assert state["w"].tolist() == [1.0] * 4
        manager.save(3, state).result()
        assert manager.latest().step == 3
    assert all(code in {0, 1} for _, code in commands(run))
    assert "Traceback" not in capsys.readouterr().err
    assert 3 in [info.step for info in Catalog(LocalStorage(run)).committed()]


@pytest.mark.parametrize(
    "name", [".ckpt-suite/pins.json", ".ckpt-suite/damaged.json", ".ckpt-suite/writer.json"]
)
@pytest.mark.parametrize("spoil", [link_out, pipe, directory, sparse])
def test_what_is_no_file_of_ours_in_the_root_blocks_no_resume_and_no_command(run, name, spoil, capsys):
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("{}")
    if spoil is link_out:
        (run / name).unlink()
        (run / name).symlink_to("/etc/hostname")
    else:
        spoil(run / name)
    with CheckpointManager(run) as manager:
        assert manager.load(weights()).step == 2
    for command in (["ls"], ["show"], ["verify", "--all"], ["prune", "--keep-latest", "1", "--dry-run"]):
        assert main([*command, str(run)]) == 0, command
    assert "Traceback" not in capsys.readouterr().err
    assert Owner.of(LocalStorage(run)) is None


def test_pins_that_nobody_can_read_let_nothing_be_pruned(run):
    sparse(run / ".ckpt-suite/pins.json")
    assert main(["prune", str(run), "--keep-latest", "1"]) == 0
    assert len(Catalog(LocalStorage(run)).committed()) == 2


def test_a_checkpoint_that_is_a_link_to_outside_is_told_and_passed_over(run, caplog):
    elsewhere = run.parent / "elsewhere"
    (run / TWO).rename(elsewhere)
    (run / TWO).symlink_to(elsewhere)
    with CheckpointManager(run) as manager:
        assert manager.resume(weights()) == 1
        assert "a symbolic link" in caplog.text
        with pytest.raises(CheckpointError, match="leads out of the checkpoint root"):
            manager.load(weights(), name=TWO)


@pytest.mark.parametrize("spoil", [link_out, pipe, directory])
def test_a_file_that_is_none_of_ours_is_corrupt_and_not_storage_that_is_unwell(run, spoil):
    spoil(run / TWO / "shared.json")
    failures = verify(LocalStorage(run), TWO)
    assert [failure.path for failure in failures] == ["shared.json"]
    with pytest.raises((CorruptCheckpointError, FileNotFoundError)):
        read_small(LocalStorage(run), f"{TWO}/shared.json")
    assert issubclass(ForeignFileError, PermissionError)


# --- sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "storage", [MemoryStorage(), object_storage("memory://small/run")], ids=["posix", "bucket"]
)
def test_a_small_file_is_not_read_before_its_size_is_known_to_be_sane(storage):
    storage = FaultyStorage(storage)
    storage.write_bytes("a/b", b"x" * 11)
    assert read_small(storage, "a/b", 11) == b"x" * 11
    before = len(storage.operations)
    with pytest.raises(CorruptCheckpointError, match="a/b: has 11 bytes, and may have 10 at most") as caught:
        read_small(storage, "a/b", 10)
    assert caught.value.failures[0].path == "b"
    assert "read" not in [operation.method for operation in storage.operations[before:]]


def test_a_manifest_is_compared_with_its_marker_before_it_is_read():
    storage = posix_like()
    info = save(storage, 1)
    inner = FaultyStorage(storage)
    storage.replace(f"{info.name}/manifest.json", storage.read_bytes(f"{info.name}/manifest.json") + b" ")
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
        Catalog(inner).manifest(info.name)
    assert [o.key for o in inner.operations if o.method == "read"] == [f"{info.name}/COMMITTED"]


def test_what_could_not_be_read_again_is_not_saved(monkeypatch, tmp_path):
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", 2000)
    manager = CheckpointManager(tmp_path)
    with pytest.raises((SaveError, ConfigError), match="keep annotations short"):
        manager.save(1, weights(), annotations={"long": "x" * 2000}).result()
    with CheckpointManager(tmp_path) as manager:
        manager.save(2, weights()).result()
    storage, huge = posix_like(), replace(manifest_of(1).files[3], size_bytes=HUGE)
    working = begin(storage, ONE, "0" * 8)
    with pytest.raises(SaveError, match=r"rank-00000\.json has .* keep large values in tensors"):
        commit(storage, working, ONE, replace(manifest_of(1), files=(huge,)))
    monkeypatch.setattr(pins, "MAX_PINS_BYTES", 100)
    with pytest.raises(ConfigError, match="shorten them"):
        Catalog(LocalStorage(tmp_path)).pin(2, "x" * 200)
    assert Catalog(LocalStorage(tmp_path)).pins() == {}


def test_what_a_hostile_manifest_promises_is_not_read_into_memory(run, monkeypatch):
    monkeypatch.setattr(files, "BIGGEST_SMALL_FILE", 30)
    with CheckpointManager(run) as manager, pytest.raises(CorruptCheckpointError, match="30 at most"):
        manager.load(weights(), step=2)


# --- another checkpoint's name, another manifest's marker ---------------------------------------------------


@pytest.mark.parametrize("make", [posix_like, bucket_like])
def test_a_checkpoint_under_another_steps_name_is_told_and_counts_for_nothing(make, caplog):
    storage = make()
    for step in (1, 2, 3):
        save(storage, step)
    for entry in storage.list(TWO):
        if entry.is_directory:
            continue
        storage.replace(f"{TWO}/{entry.name}", storage.read_bytes(f"{ONE}/{entry.name}"))
    assert [info.step for info in Catalog(storage).committed()] == [1, 3]
    assert "is of step 1, under the name of another step" in caplog.text
    assert [failure.path for failure in verify(storage, TWO)] == ["COMMITTED"]
    with pytest.raises(CorruptCheckpointError, match="rename the directory to step-000000001"):
        Catalog(storage).find(step=2)
    assert verify(storage, ONE) == verify(storage, "step-000000003") == []


def test_a_copy_under_a_steps_name_makes_way_for_the_save_of_that_step(run):
    shutil.rmtree(run / TWO)
    shutil.copytree(run / ONE, run / TWO)
    state = weights()
    with CheckpointManager(run) as manager:
        assert manager.resume(state) == 1
        state["w"].fill_(7.0)
        manager.save(2, state).result()
        assert [info.step for info in manager.checkpoints()] == [1, 2]
    with CheckpointManager(run) as manager:
        assert manager.resume(state) == 2
    assert state["w"].tolist() == [7.0] * 4


@pytest.mark.parametrize(
    "change",
    [
        {"step": 7}, {"step": 2**53}, {"save_id": "f" * 24}, {"created": 1.0}, {"world_size": 9},
        {"size_bytes": 1}, {"metrics": {"loss": 0.0}},
    ],
    ids=str,
)  # fmt: skip
def test_a_marker_that_is_not_its_manifests_is_passed_over(run, change):
    (run / TWO).rename(run / "best")
    path = run / "best" / "COMMITTED"
    path.write_bytes(replace(Marker.from_bytes(path.read_bytes()), **change).to_bytes())
    assert [failure.path for failure in verify(LocalStorage(run), "best")] == ["COMMITTED"]
    with CheckpointManager(run) as manager:
        assert manager.resume(weights()) == 1


@pytest.mark.parametrize("save_id", ["../../home/x", "A" * 24, "abc"])
def test_a_save_id_that_no_save_has_is_damage(run, tmp_path, save_id, capsys):
    folder = run / TWO
    manifest = replace(Manifest.from_bytes((folder / "manifest.json").read_bytes()), save_id=save_id)
    content = manifest.to_bytes()
    (folder / "manifest.json").write_bytes(content)
    (folder / "COMMITTED").write_bytes(Marker.of(manifest, content).to_bytes())
    assert main(["cp", str(folder), str(tmp_path / "copy")]) == 1
    assert "8 to 32 lower-case hex digits" in capsys.readouterr().err
    with CheckpointManager(run) as manager:
        assert manager.resume(weights()) == 1


def test_a_marker_with_nan_among_its_metrics_is_its_manifests():
    storage = posix_like()
    save(storage, 1, metrics={"loss": float("nan"), "best": float("inf")})
    assert verify(storage, ONE) == []


def test_a_manifest_without_metadata_is_damage_and_the_older_one_is_resumed(run):
    folder = run / TWO
    manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes())
    manifest = replace(manifest, files=tuple(e for e in manifest.files if e.path != ".metadata"))
    content = manifest.to_bytes()
    (folder / "manifest.json").write_bytes(content)
    (folder / "COMMITTED").write_bytes(Marker.of(manifest, content).to_bytes())
    with CheckpointManager(run) as manager:
        with pytest.raises(CorruptCheckpointError, match=r"not among the files that manifest\.json lists"):
            manager.load(weights(), step=2)
        assert manager.resume(weights()) == 1


# --- object stores ------------------------------------------------------------------------------------------


class OddKeys:
    """What S3 lists where somebody has put objects that no path can lead to."""

    def __init__(self, filesystem, *names):
        self._ls, self._names = filesystem.ls, names
        filesystem.ls = self

    def __call__(self, path, **options):
        odd = [{"name": f"{path}/{name}", "type": "directory", "size": 0} for name in self._names]
        return [*self._ls(path, **options), *odd]


def test_odd_keys_in_a_bucket_are_left_out_and_told_once(caplog):
    storage = bucket_like()
    save(storage, 1)
    OddKeys(storage.filesystem, ".", "..", "\0", "a\x1b[31m")
    state = {"w": torch.ones(4)}
    with CheckpointManager(storage) as manager:
        manager.save(2, state)
        manager.wait()
        assert manager.resume(state) == 2
    told = [r.getMessage() for r in caplog.records if "no path may have" in r.getMessage()]
    assert len(told) == len(set(told))
    assert all(message.isprintable() for message in told)
    assert sum(message.startswith(f"{storage.url} holds") for message in told) == 1
    assert [info.step for info in Catalog(storage).committed(abandoned=True)] == [1, 2]


def archived(storage, key):
    """A storage of which some objects have been moved to an archive."""
    return FaultyStorage(storage, [Fault(method="open*", key=key, error=ArchivedError("archived"))])


@pytest.mark.parametrize("key", [f"{TWO}/__0_0.distcp", f"{TWO}/COMMITTED", f"{TWO}/manifest.json"])
def test_the_newest_checkpoint_in_an_archive_is_refused_as_such(history, key):
    storage = archived(LocalStorage(history), key)
    with CheckpointManager(storage) as manager:
        with pytest.raises(ArchivedError, match=f"{TWO}: archived.*nothing older was tried.*step= or name="):
            manager.resume(weights())
        state = weights()
        assert manager.load(state, step=1).step == 1
        with pytest.raises(ArchivedError):
            manager.load(state, step=2)
        assert Catalog(storage).survey().everything[0].damaged is None


@pytest.mark.parametrize("key", [f"{ONE}/__0_0.distcp", f"{ONE}/COMMITTED", f"{ONE}/*"])
def test_an_older_checkpoint_in_an_archive_blocks_nothing(history, key):
    storage = archived(LocalStorage(history), key)
    with CheckpointManager(storage) as manager:
        assert manager.resume(weights()) == 2
    assert 2 in [info.step for info in Catalog(storage).committed()]


def test_archived_checkpoints_are_no_reason_not_to_verify_the_others(run, monkeypatch, capsys):
    from ckpt_core.cli.upkeep import _verify

    def verify_or_archived(storage, name, **options):
        if name == ONE:
            raise ArchivedError("archived: restore it")
        return verify(storage, name, **options)

    monkeypatch.setattr(_verify, "verify", verify_or_archived)
    assert main(["verify", str(run), "--all", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["ok"] for each in found] == [False, True]
    assert Catalog(LocalStorage(run)).known_damage(ONE) is None


def test_names_from_storage_cannot_steer_the_terminal(run, capsys, caplog):
    caplog.set_level(logging.WARNING)
    odd = run / "a\x1b[31m\u202eb"
    odd.mkdir()
    (odd / "COMMITTED").write_text("x")
    for _, code in commands(run):
        assert code in {0, 1}
    captured = capsys.readouterr()
    assert all(line.isprintable() for line in (captured.out + captured.err).splitlines())
    assert all(record.getMessage().isprintable() for record in caplog.records)
