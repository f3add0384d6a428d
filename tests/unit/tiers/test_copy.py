"""Copies of checkpoints between roots: verified, resumable, committed as saves are."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_core.commit import Catalog, begin, collect_orphans, commit, verify, working_name
from ckpt_core.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError
from ckpt_core.formats.checksums import checksum
from ckpt_core.names import aside_name, run_name
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.tiers import CheckpointCopy, CopyTerms, copy_checkpoint
from ckpt_core.types import FileEntry
from tests.kit.memory import MemoryStorage
from tests.unit.commit.checkpoints import FILES, bucket_like, manifest_of, save, write_files

pytestmark = pytest.mark.reliability

NAME = "step-000000005"
KINDS = ("local", "memory", "bucket")


def make(kind: str, tmp_path) -> Storage:
    if kind == "local":
        return LocalStorage(tmp_path / secrets.token_hex(4))
    return MemoryStorage() if kind == "memory" else bucket_like()


def content_of(storage: Storage, name: str = NAME, inner: str = "") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for child in storage.list(f"{name}/{inner}".rstrip("/")):
        path = f"{inner}/{child.name}".lstrip("/")
        if child.is_directory:
            found |= content_of(storage, name, path)
        else:
            found[path] = storage.read_bytes(f"{name}/{path}")
    return found


def assert_clean(storage: Storage, *names: str) -> None:
    """The root holds the checkpoints, whole, and nothing else."""
    assert [info.name for info in Catalog(storage).committed()] == list(names)
    assert [entry.name for entry in storage.list("")] == list(names)
    assert [failure for name in names for failure in verify(storage, name)] == []


@pytest.mark.parametrize("middle", KINDS)
def test_a_copy_there_and_back_is_the_same_checkpoint_byte_by_byte(tmp_path, middle):
    first, second, third = make("local", tmp_path), make(middle, tmp_path), make("local", tmp_path)
    info = save(first, 5)
    first.write_bytes(f"{NAME}/manifest.json.sig", b"signed")
    first.write_bytes(f"{NAME}/notes.txt", b"of the user, in no manifest")
    assert copy_checkpoint(first, second, NAME, CopyTerms()) == info
    assert copy_checkpoint(second, third, NAME, CopyTerms()) == info
    expected = content_of(first)
    del expected["notes.txt"]
    assert content_of(second) == content_of(third) == expected
    assert_clean(second, NAME)
    assert_clean(third, NAME)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_the_target_has_is_not_copied_again(tmp_path, kind):
    source, target = make("local", tmp_path), make(kind, tmp_path)
    info = save(source, 5)
    copy_checkpoint(source, target, NAME, CopyTerms())
    seen = FaultyStorage(target)
    done: list[int] = []
    assert copy_checkpoint(source, seen, NAME, CopyTerms(progress=done.append)) == info
    assert {operation.method for operation in seen.operations} <= {"open", "read", "size", "entry", "list"}
    assert sum(done) == info.size_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_another_checkpoint_under_the_name_is_refused_and_stays(tmp_path, kind):
    source, target = make("local", tmp_path), make(kind, tmp_path)
    save(source, 5)
    working = begin(target, NAME, "0000beef")
    write_files(target, working)
    commit(target, working, NAME, replace(manifest_of(5), save_id="0000beef"))
    before = content_of(target)
    with pytest.raises(CheckpointExistsError, match=r"another checkpoint: step 5 of save 0000beef"):
        copy_checkpoint(source, target, NAME, CopyTerms())
    assert content_of(target) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ["crc32", "sha256"])
def test_a_damaged_source_is_named_and_never_committed(tmp_path, kind, algorithm):
    source, target = make("memory", tmp_path), make(kind, tmp_path)
    entries = tuple(
        FileEntry(path=path, size_bytes=len(content), checksum=checksum(content, algorithm))
        for path, content in FILES.items()
    )
    write_files(source, begin(source, NAME, "00000005"))
    manifest = replace(manifest_of(5), files=entries)
    commit(source, working_name(source, NAME, "00000005"), NAME, manifest)
    source.replace(f"{NAME}/__1_0.distcp", b"\0" * 4899 + b"?")
    with pytest.raises(CorruptCheckpointError, match=rf"__1_0\.distcp: checksum is {algorithm}:") as caught:
        copy_checkpoint(source, target, NAME, CopyTerms())
    assert [failure.path for failure in caught.value.failures] == ["__1_0.distcp"]
    assert Catalog(target).committed() == []
    source.replace(f"{NAME}/__1_0.distcp", FILES["__1_0.distcp"])
    copy_checkpoint(source, target, NAME, CopyTerms())
    assert_clean(target, NAME)


@pytest.mark.parametrize("problem", ["missing", "short", "unreadable", "link"])
def test_files_that_cannot_be_read_whole_are_damage(tmp_path, problem):
    local, target = LocalStorage(tmp_path / "run"), MemoryStorage()
    save(local, 5)
    path = tmp_path / "run" / NAME / "__0_0.distcp"
    faults = []
    if problem == "missing":
        path.unlink()
    elif problem == "short":
        os.truncate(path, 100)
    elif problem == "link":
        path.unlink()
        path.symlink_to("/etc/hostname")
    else:
        faults = [Fault(method="read_into", key=f"{NAME}/__0_0.distcp", error=OSError(5, "lost"))]
    with pytest.raises(CorruptCheckpointError, match="__0_0"):
        copy_checkpoint(FaultyStorage(local, faults), target, NAME, CopyTerms())
    assert Catalog(target).committed() == []


def test_a_source_that_is_pruned_meanwhile_is_not_called_damaged(tmp_path):
    source = make("local", tmp_path)
    save(source, 5)
    gone = Fault(method="open_ranges", before=lambda _: source.delete(NAME))
    with pytest.raises(CheckpointNotFoundError, match="pruned or replaced while it was copied"):
        copy_checkpoint(FaultyStorage(source, [gone]), bucket_like(), NAME, CopyTerms())


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_fails_at_any_operation_is_completed_by_the_next_one(tmp_path, kind):
    source, clean = make("memory", tmp_path), FaultyStorage(make(kind, tmp_path))
    save(source, 5)
    copy_checkpoint(source, clean, NAME, CopyTerms())
    for number in range(len(clean.operations)):
        target = make(kind, tmp_path)
        failing = FaultyStorage(target, [Fault(nth=number, error=OSError(121, "gone"))])
        with suppress(Exception):  # any error, so long as nothing is lost
            copy_checkpoint(source, failing, NAME, CopyTerms())
        assert all(verify(target, info.name) == [] for info in Catalog(target).committed()), number
        copy_checkpoint(source, target, NAME, CopyTerms())
        assert_clean(target, NAME)


@pytest.mark.parametrize("kind", KINDS)
def test_a_torn_copy_is_kept_for_who_will_continue_it_and_else_collected(tmp_path, kind):
    source, target = make("memory", tmp_path), make(kind, tmp_path)
    info = save(source, 5)
    copy = CheckpointCopy.of(source, target, NAME)
    assert copy.begin()
    copy.copy_files(copy.manifest.files[:2], CopyTerms())
    kept = working_name(target, NAME, info.save_id)
    assert collect_orphans(target, keep=[kept]) == []
    assert copy.begin()
    copy.copy_files(copy.manifest.files, CopyTerms())
    assert target.exists(f"{kept}/__1_0.distcp")
    assert collect_orphans(target, keep=()) == [kept]
    assert target.list("") == []


def test_the_remains_of_another_save_in_a_bucket_are_refused_and_stay():
    source, target = MemoryStorage(), bucket_like()
    save(source, 5)
    write_files(target, begin(target, NAME, "0000beef"))
    before = content_of(target)
    with pytest.raises(CheckpointExistsError, match="unfinished"):
        copy_checkpoint(source, target, NAME, CopyTerms())
    assert content_of(target) == before


def test_a_copy_goes_into_a_users_directory_beside_their_files(tmp_path):
    source, target = make("memory", tmp_path), make("local", tmp_path)
    save(source, 5)
    target.write_bytes(f"{NAME}/readme.txt", b"mine")
    copy_checkpoint(source, target, NAME, CopyTerms())
    assert target.read_bytes(f"{NAME}/readme.txt") == b"mine"
    assert_clean(target, NAME)


def test_stop_ends_a_copy_that_a_later_one_continues(tmp_path):
    source, target = make("memory", tmp_path), make("local", tmp_path)
    save(source, 5)

    def stop():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        copy_checkpoint(source, target, NAME, CopyTerms(stop=stop))
    assert Catalog(target).committed() == []
    copy_checkpoint(source, target, NAME, CopyTerms())
    assert_clean(target, NAME)


def test_a_copy_may_have_another_name_at_the_target(tmp_path):
    source, target, other = make("memory", tmp_path), bucket_like(), run_name(NAME, "0badcafe")
    save(source, 5)
    copy = CheckpointCopy.of(source, target, NAME, as_name=other)
    assert copy.begin()
    copy.copy_files(copy.manifest.files, CopyTerms())
    assert copy.finish().name == other
    assert_clean(target, other)


def a_file(tier: Path, name: str) -> None:
    (tier / name).write_text("mine")


def a_link_to_a_file(tier: Path, name: str) -> None:
    (tier / "file").write_text("mine")
    (tier / name).symlink_to("file")


def a_directory_with_a_directory_for_data(tier: Path, name: str) -> None:
    (tier / name / "__0_0.distcp").mkdir(parents=True)
    (tier / name / "__0_0.distcp" / "notes").write_text("mine")


def a_socket(tier: Path, name: str) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        os.chdir(tier)
        bound.bind(name)


@pytest.mark.parametrize(
    "occupy", [a_file, a_link_to_a_file, a_directory_with_a_directory_for_data, a_socket]
)
def test_what_has_the_name_at_a_disk_and_is_not_ours_is_moved_aside_unharmed(tmp_path, occupy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, target = LocalStorage(tmp_path / "source"), LocalStorage(tmp_path / "target")
    info = save(source, 1)
    (tmp_path / "target").mkdir()
    occupy(tmp_path / "target", info.name)
    copy_checkpoint(source, target, info.name, CopyTerms())
    assert verify(target, info.name) == []
    paths = list((tmp_path / "target").rglob("*"))
    assert len([path for path in paths if ".replaced-" in path.name or ".yours-" in path.name]) == 1
    mine = [path for path in paths if path.is_file() and path.read_bytes() == b"mine"]
    assert bool(mine) is (occupy is not a_socket)


def test_a_file_in_place_of_the_working_directory_is_named_and_not_tried_again(tmp_path):
    source, target = MemoryStorage("source"), LocalStorage(tmp_path)
    info = save(source, 1)
    copy = CheckpointCopy.of(source, target, info.name)
    target.write_bytes(copy.working, b"mine")
    with pytest.raises(CheckpointExistsError, match="is a file, where the directory of a copy must be"):
        copy.begin()
    assert target.read_bytes(copy.working) == b"mine"


def test_an_object_in_place_of_the_prefix_is_named_where_it_is_in_the_way():
    source, target = MemoryStorage("source"), bucket_like()
    info = save(source, 1)
    target.write_bytes(info.name, b"mine")
    with pytest.raises(CheckpointExistsError, match="is a file, where the directory of a copy must be"):
        CheckpointCopy.of(source, target, info.name).begin()


def test_a_copy_settles_what_was_set_aside_for_its_own_name_only(tmp_path):
    source, target = LocalStorage(tmp_path / "source"), LocalStorage(tmp_path / "target")
    names = [save(source, step).name for step in (1, 2, 3)]
    for name in names[:2]:
        copy_checkpoint(source, target, name, CopyTerms())
    asides = [aside_name(name, "0123abcd") for name in names[:2]]
    for name, aside in zip(names[:2], asides, strict=True):
        target.rename(name, aside)
    copy_checkpoint(source, target, names[2], CopyTerms())
    assert {asides[0], asides[1], names[2]} <= target.directories("")
    copy_checkpoint(source, target, names[0], CopyTerms())
    assert target.directories("") == {names[0], asides[1], names[2]}
    assert verify(target, names[0]) == []
