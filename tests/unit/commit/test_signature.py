"""The signature of a manifest: written before the marker, and gone with what it signs."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Callable

import pytest

from ckpt_core.commit import (
    Catalog,
    begin,
    collect_orphans,
    commit,
    remove,
    require_trusted,
    verify,
    write_signature,
)
from ckpt_core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    SaveError,
    UntrustedCheckpointError,
)
from ckpt_core.names import MANIFEST, MARKER, SIGNATURE, step_name
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage
from tests.unit.commit.checkpoints import bucket_like, manifest_of, posix_like, save, write_files


class Crash(BaseException):
    """The process ends here."""


def crash(_operation: object) -> None:
    raise Crash


def sign(manifest: bytes) -> bytes:
    return hmac.digest(b"key", manifest, "sha256")


def judge(_name: str, manifest: bytes, signature: bytes) -> bool:
    return hmac.compare_digest(signature, sign(manifest))


def save_signed(storage: Storage, step: int, *, name: str | None = None, replace: bool = False) -> None:
    name = name or step_name(step)
    working = begin(storage, name, secrets.token_hex(4), replace=replace)
    write_files(storage, working)
    manifest = manifest_of(step)
    write_signature(storage, working, manifest, sign)
    commit(storage, working, name, manifest, replace=replace)


def steps(storage: Storage) -> list[int]:
    return [info.step for info in Catalog(storage).committed()]


def names(storage: Storage, directory: str) -> set[str]:
    return {entry.name for entry in storage.list(directory)}


@pytest.fixture(params=[posix_like, bucket_like])
def new_storage(request) -> Callable[[], Storage]:
    return request.param


def crash_points(new_storage, prepare, act):
    """Storages on which `act` crashed before and after each of its operations in turn."""
    rehearsal = FaultyStorage(prepare(new_storage()))
    act(rehearsal)
    for nth in range(len(rehearsal.operations)):
        for fault in (Fault(nth=nth, error=Crash()), Fault(nth=nth, after=crash)):
            storage = prepare(new_storage())
            with contextlib.suppress(Crash):  # what finds nothing has no "after"
                act(FaultyStorage(storage, [fault]))
            yield storage


def with_signed(*committed: int):
    def prepare(storage: Storage) -> Storage:
        for step in committed:
            save_signed(storage, step)
        return storage

    return prepare


def test_the_signature_is_durable_before_the_marker_is_written(new_storage):
    storage = FaultyStorage(new_storage())
    save_signed(storage, 1)
    written = [
        operation.key.rpartition("/")[2] for operation in storage.operations if operation.method == "close"
    ]
    assert written.index(SIGNATURE) < written.index(MANIFEST) < written.index(MARKER)
    assert require_trusted(storage, "step-000000001", judge) == Catalog(storage).find(step=1).manifest_sha256
    assert verify(storage, "step-000000001") == []


@pytest.mark.slow
def test_a_kill_at_any_point_leaves_a_signed_checkpoint_or_none(new_storage):
    seen = set()
    for storage in crash_points(new_storage, with_signed(1), lambda storage: save_signed(storage, 2)):
        seen.add(tuple(steps(storage)))
        for info in Catalog(storage).committed():
            require_trusted(storage, info.name, judge)
        if steps(storage) == [1]:
            save_signed(storage, 2)  # what is left of the signature is not in the way
        collect_orphans(storage, keep=())
        assert names(storage, "") == {"step-000000001", "step-000000002"}
        require_trusted(storage, "step-000000002", judge)
    assert seen == {(1,), (1, 2)}


@pytest.mark.slow
def test_a_prune_that_is_killed_anywhere_leaves_no_signature_behind(new_storage):
    def prune(storage: Storage) -> None:
        remove(storage, Catalog(storage).find(step=1))

    for storage in crash_points(new_storage, with_signed(1, 2), prune):
        collect_orphans(storage, keep=())
        assert len(storage.list("")) == len(steps(storage))
        for info in Catalog(storage).committed():
            require_trusted(storage, info.name, judge)


@pytest.mark.parametrize("signed", [True, False])
def test_a_signature_never_passes_to_the_checkpoint_that_takes_the_name(tmp_path, signed):
    storage = LocalStorage(tmp_path)
    save_signed(storage, 1, name="last")
    storage.write_bytes("last/notes.txt", b"mine")
    if signed:
        save_signed(storage, 2, name="last", replace=True)
        require_trusted(storage, "last", judge)
    else:
        working = begin(storage, "last", "0000000b", replace=True)
        write_files(storage, working)
        commit(storage, working, "last", manifest_of(2), replace=True)
        assert SIGNATURE not in names(storage, "last")
    assert storage.read_bytes("last/notes.txt") == b"mine"
    assert not [name for name in names(storage, "last") if "yours" in name]


def test_a_replacement_that_is_killed_anywhere_leaves_a_signature_of_its_own():
    def prepare(storage: Storage) -> Storage:
        save_signed(storage, 1, name="last")
        return storage

    def replace(storage: Storage) -> None:
        save_signed(storage, 2, name="last", replace=True)

    for storage in crash_points(posix_like, prepare, replace):
        collect_orphans(storage, keep=())
        assert names(storage, "") == {"last"}
        require_trusted(storage, "last", judge)


def test_a_merge_into_a_directory_of_the_users_that_is_killed_anywhere_brings_the_signature():
    def prepare(storage: Storage) -> Storage:
        storage.write_bytes("step-000000001/notes.txt", b"mine")
        return storage

    for storage in crash_points(posix_like, prepare, lambda storage: save_signed(storage, 1)):
        collect_orphans(storage, keep=())
        assert storage.read_bytes("step-000000001/notes.txt") == b"mine"
        if steps(storage):
            require_trusted(storage, "step-000000001", judge)
            remove(storage, Catalog(storage).find(step=1))
        assert names(storage, "step-000000001") - {"model"} == {"notes.txt"}  # an empty directory may stay


def test_a_file_of_the_users_that_only_looks_like_a_signature_stays(new_storage):
    storage = new_storage()
    save_signed(storage, 1)
    others = {f"{SIGNATURE}.bak", "model.sig", "manifest.json.asc"}
    for name in others:
        storage.write_bytes(f"step-000000001/{name}", b"mine")
    remove(storage, Catalog(storage).find(step=1))
    assert names(storage, "step-000000001") == others


def test_a_signature_that_came_late_is_not_in_the_way_of_the_next_save():
    storage = bucket_like()
    storage.write_bytes(f"step-000000001/{SIGNATURE}", b"of a job that was replaced")
    save_signed(storage, 1)
    require_trusted(storage, "step-000000001", judge)


@pytest.mark.parametrize("returned", [None, b"", "text", bytearray(b"x"), b"x" * (1 << 20) + b"x", 7])
def test_what_is_no_signature_fails_the_save_and_writes_none(returned):
    storage = posix_like()
    working = begin(storage, "step-000000001", "0000000a")
    with pytest.raises(SaveError, match="could not be signed: sign_manifest returned"):
        write_signature(storage, working, manifest_of(1), lambda _manifest: returned)
    assert names(storage, working) == set()


def refuse(_name: str, _manifest: bytes, _signature: bytes) -> bool:
    raise ValueError("the signature is wrong")


@pytest.mark.parametrize(
    "answer",
    [False, None, 1, "yes", refuse],
    ids=["False", "None", "1", "yes", "raises"],
)
def test_whatever_is_not_true_refuses(new_storage, answer):
    storage = new_storage()
    save_signed(storage, 1)
    with pytest.raises(UntrustedCheckpointError, match="is not trusted: verify_manifest") as caught:
        require_trusted(storage, "step-000000001", answer if answer is refuse else lambda *_: answer)
    assert caught.value.why.startswith("verify_manifest r")


def test_a_judge_that_cannot_be_asked_refuses_nothing():
    storage = posix_like()
    save_signed(storage, 1)

    def unreachable(_name: str, _manifest: bytes, _signature: bytes) -> bool:
        raise ConnectionError("the key service is down")

    with pytest.raises(LoadError, match="key service is down"):
        require_trusted(storage, "step-000000001", unreachable)


def test_the_judge_is_given_the_very_bytes_and_nothing_where_nothing_was_signed(new_storage):
    storage = new_storage()
    save(storage, 1)
    save_signed(storage, 2)
    given = []

    def look(*arguments: object) -> bool:
        given.append(arguments)
        return True

    for name in ("step-000000001", "step-000000002"):
        content = storage.read_bytes(f"{name}/{MANIFEST}")
        assert require_trusted(storage, name, look) == hashlib.sha256(content).hexdigest()
        assert given.pop() == (name, content, sign(content) if name.endswith("2") else b"")
    assert require_trusted(storage, "step-000000001", None) is None


def test_only_the_manifest_that_was_accepted_will_do(new_storage):
    storage = new_storage()
    save_signed(storage, 1)
    accepted = require_trusted(storage, "step-000000001", judge)
    assert verify(storage, "step-000000001", sha256=accepted) == []
    (failure,) = verify(storage, "step-000000001", sha256="0" * 64)
    assert failure.path == MANIFEST
    with pytest.raises(CorruptCheckpointError, match="its SHA-256 is"):
        Catalog(storage).manifest("step-000000001", sha256="0" * 64)


def test_a_huge_signature_is_never_read_into_memory(tmp_path):
    storage = LocalStorage(tmp_path)
    save_signed(storage, 1)
    with (tmp_path / "step-000000001" / SIGNATURE).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(UntrustedCheckpointError, match="too large"):
        require_trusted(storage, "step-000000001", judge)


def test_what_has_no_manifest_is_refused_and_what_is_not_there_is_not_found(new_storage):
    storage = new_storage()
    write_files(storage, "stock")
    with pytest.raises(UntrustedCheckpointError, match="no manifest"):
        require_trusted(storage, "stock", lambda *_: True)
    with pytest.raises(CheckpointNotFoundError):
        require_trusted(storage, "nothing", lambda *_: True)
    save_signed(storage, 1)
    storage.replace(f"step-000000001/{MANIFEST}", storage.read_bytes(f"step-000000001/{MANIFEST}") + b" ")
    with pytest.raises(CorruptCheckpointError):
        require_trusted(storage, "step-000000001", lambda *_: True)
