from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.commit import begin, commit, share, verify
from ckpt_core.errors import ConfigError, FileFailure
from ckpt_core.formats.checksums import checksum
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.types import FileEntry
from tests.unit.commit.checkpoints import FILES, bucket_like, manifest_of, posix_like, save

NAME = "step-000000001"


@pytest.fixture(params=[posix_like, bucket_like])
def storage(request):
    storage = request.param()
    save(storage, 1)
    return storage


def problems(failures):
    return {failure.path: failure.problem for failure in failures}


def test_an_intact_checkpoint_has_no_failures(storage):
    assert verify(storage, NAME) == []


@pytest.mark.parametrize("path", FILES)
def test_a_flipped_bit_in_any_file_is_found(storage, path):
    content = bytearray(FILES[path])
    content[len(content) // 2] ^= 1
    storage.replace(f"{NAME}/{path}", bytes(content))
    (failure,) = verify(storage, NAME)
    assert failure.path == path
    assert failure.problem == f"checksum is {checksum(content)}, {checksum(FILES[path])} was committed"


def test_truncated_grown_and_missing_files_are_all_reported(storage):
    storage.replace(f"{NAME}/__0_0.distcp", FILES["__0_0.distcp"][:-1])
    storage.replace(f"{NAME}/__1_0.distcp", FILES["__1_0.distcp"] + b"x")
    storage.delete(f"{NAME}/.metadata")
    assert problems(verify(storage, NAME)) == {
        ".metadata": "missing",
        "__0_0.distcp": "has 10239 bytes, 10240 were committed",
        "__1_0.distcp": "has 4901 bytes, 4900 were committed",
    }


def test_a_changed_manifest_is_found(storage):
    content = storage.read_bytes(f"{NAME}/manifest.json")
    storage.replace(f"{NAME}/manifest.json", content.replace(b'"note"', b'"nose"'))
    assert list(problems(verify(storage, NAME))) == ["manifest.json"]


@pytest.mark.parametrize("marker", [None, b"", b'{"format_version": 99}'], ids=["none", "empty", "newer"])
def test_a_missing_or_unreadable_marker_is_a_failure(storage, marker):
    storage.delete(f"{NAME}/COMMITTED")
    if marker is not None:
        storage.write_bytes(f"{NAME}/COMMITTED", marker)
    assert len(verify(storage, NAME)) == 1


def test_a_storage_that_fails_is_reported_file_by_file(storage):
    fault = Fault(method="open", key="*/__0_0.distcp", error=OSError(5, "Input/output error"))
    (first, second) = verify(FaultyStorage(storage, [fault]), NAME)
    assert (first.path, second.path) == ("__0_0.distcp", "model/__0_0.distcp")
    assert "Input/output error" in first.problem


def test_an_algorithm_from_the_future_is_reported_not_passed(storage):
    working = begin(storage, "step-000000002", "abcdef01")
    storage.write_bytes(f"{working}/new", b"x")
    entry = FileEntry(path="new", size_bytes=1, checksum="xxh3:00")
    commit(storage, working, "step-000000002", replace(manifest_of(2), files=(entry,)))
    (failure,) = verify(storage, "step-000000002")
    assert "upgrade" in failure.problem


def test_only_the_files_asked_for_are_read(storage):
    watched = FaultyStorage(storage)
    assert verify(watched, NAME, paths=["__1_0.distcp"]) == []
    read = {o.key.removeprefix(f"{NAME}/") for o in watched.operations if o.method == "read"}
    assert read & set(FILES) == {"__1_0.distcp"}
    with pytest.raises(ConfigError, match="unknown"):
        verify(storage, NAME, paths=["unknown"])


sizes = st.lists(st.integers(0, 10**12), max_size=40)


@given(sizes, st.integers(1, 9))
def test_every_file_falls_to_exactly_one_rank(sizes, world_size):
    files = [FileEntry(path=str(i), size_bytes=s, checksum="crc32:00") for i, s in enumerate(sizes)]
    shares = [share(files, rank, world_size) for rank in range(world_size)]
    assert sorted(path for paths in shares for path in paths) == sorted(entry.path for entry in files)


@given(sizes, st.integers(1, 9))
def test_no_rank_reads_more_than_the_average_and_one_file(sizes, world_size):
    files = [FileEntry(path=str(i), size_bytes=s, checksum="crc32:00") for i, s in enumerate(sizes)]
    loads = [sum(sizes[int(path)] for path in share(files, r, world_size)) for r in range(world_size)]
    assert max(loads) <= sum(sizes) / world_size + max(sizes, default=0)


def test_a_failure_reads_as_a_sentence():
    assert str(FileFailure(path="a", problem="missing")) == "a: missing"
