"""Marks of damaged checkpoints: what they say, of which checkpoint, and that they are only advice."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from ckpt_core.commit import Catalog, begin, commit, quarantine, remove, verify
from ckpt_core.commit._catalog import MAX_MARKS, MAX_MARKS_BYTES, Mark, Marks, read_marks, replace_marks
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.formats import codec
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import FaultyStorage
from tests.unit.commit.checkpoints import bucket_like, manifest_of, posix_like, save, write_files

ONE, TWO = "step-000000001", "step-000000002"
PROBLEM = "__0_0.distcp: has 3 bytes, 10240 were committed"


@pytest.fixture(params=[posix_like, bucket_like])
def storage(request):
    made = request.param()
    save(made, 1)
    save(made, 2)
    return made


def marked(storage):
    return {info.name: info.damaged for info in Catalog(storage).committed() if info.damaged is not None}


def stored(storage):
    return list(json.loads(storage.read_bytes(".ckpt-suite/damaged.json"))["checkpoints"])


def save_again(storage, name, save_id):
    """A new save of a step that is free again, with an id of its own as in life."""
    working = begin(storage, name, save_id)
    write_files(storage, working)
    return commit(storage, working, name, replace(manifest_of(int(name[-9:])), save_id=save_id))


def test_a_mark_is_seen_by_everyone_who_lists_and_hides_nothing(storage):
    Catalog(storage).mark_damaged(TWO, PROBLEM)
    catalog = Catalog(storage)
    assert marked(storage) == {TWO: PROBLEM}
    assert [info.step for info in catalog.committed()] == [1, 2]
    assert (catalog.latest().step, catalog.find(step=2).damaged) == (1, PROBLEM)
    assert (catalog.known_damage(ONE), catalog.known_damage(TWO)) == (None, PROBLEM)
    assert verify(storage, TWO) == []


def test_a_mark_says_what_is_wrong_with_which_save_and_when_it_was_found(storage):
    Catalog(storage).mark_damaged(TWO, PROBLEM)
    content = storage.read_bytes(".ckpt-suite/damaged.json")
    assert codec.has_checksum(content, source=".ckpt-suite/damaged.json")
    (mark,) = json.loads(content)["checkpoints"].values()
    assert (mark["save_id"], mark["problem"]) == ("00000002", PROBLEM)
    assert mark["found"] > 1_700_000_000


def test_a_mark_can_be_taken_away_again(storage):
    catalog = Catalog(storage)
    catalog.mark_damaged(ONE, "a")
    catalog.mark_damaged(TWO, "b")
    catalog.unmark(ONE)
    catalog.unmark(ONE)
    catalog.unmark("step-000000009")
    assert marked(storage) == {TWO: "b"}
    assert stored(storage) == [TWO]


def test_unmarking_where_nothing_is_marked_writes_nothing(storage):
    Catalog(storage).unmark(ONE)
    assert not storage.exists(".ckpt-suite/damaged.json")


def test_a_new_save_of_the_name_is_not_meant(storage):
    catalog = Catalog(storage)
    catalog.mark_damaged(TWO, PROBLEM)
    quarantine(storage, TWO)
    assert marked(storage) == {}
    if not storage.supports_rename:
        storage.delete(TWO)
    save_again(storage, TWO, "abcdef01")
    assert (marked(storage), catalog.known_damage(TWO)) == ({}, None)


def test_marks_of_what_was_pruned_or_replaced_are_dropped_at_the_next_write(storage):
    catalog = Catalog(storage)
    save(storage, 3)
    for name in (ONE, TWO):
        catalog.mark_damaged(name, PROBLEM)
    remove(storage, catalog.find(name=ONE))
    remove(storage, catalog.find(name=TWO))
    save_again(storage, TWO, "abcdef01")
    assert stored(storage) == [ONE, TWO]
    catalog.mark_damaged("step-000000003", "c")
    assert stored(storage) == ["step-000000003"]


def test_the_mark_of_a_checkpoint_whose_marker_cannot_be_read_any_more_is_kept(storage):
    catalog = Catalog(storage)
    catalog.mark_damaged(ONE, PROBLEM)
    marker = storage.read_bytes(f"{ONE}/COMMITTED")
    storage.replace(f"{ONE}/COMMITTED", b"rotten")
    catalog.mark_damaged(TWO, PROBLEM)
    storage.replace(f"{ONE}/COMMITTED", marker)
    assert marked(storage) == {ONE: PROBLEM, TWO: PROBLEM}


def test_what_is_marked_already_is_not_written_again():
    storage = FaultyStorage(posix_like())
    save(storage, 1)
    catalog = Catalog(storage)
    catalog.mark_damaged(ONE, PROBLEM)
    before = storage.read_bytes(".ckpt-suite/damaged.json")
    operations = len(storage.operations)
    catalog.mark_damaged(ONE, PROBLEM)
    assert "replace" not in [o.method for o in storage.operations[operations:]]
    assert storage.read_bytes(".ckpt-suite/damaged.json") == before
    catalog.mark_damaged(ONE, "another problem")
    assert marked(storage) == {ONE: "another problem"}


def test_only_a_committed_checkpoint_can_be_marked(storage):
    storage.write_bytes("step-000000003/COMMITTED", b"rotten")
    with pytest.raises(CheckpointNotFoundError):
        Catalog(storage).mark_damaged("step-000000009", PROBLEM)
    with pytest.raises(CorruptCheckpointError):
        Catalog(storage).mark_damaged("step-000000003", PROBLEM)
    assert not storage.exists(".ckpt-suite/damaged.json")


@pytest.mark.slow
def test_ten_thousand_marks_of_any_length_can_be_read_back(storage):
    """The file is bounded: of too many marks the latest stay, and long words are cut."""
    odd = "\udcff"  # takes six bytes in the file
    marks = {
        odd * 250 + f"{number:05d}": Mark(save_id="\0" * 64, problem=odd * 400, found=float(number))
        for number in range(10_000)
    }
    replace_marks(storage, Marks(damaged=marks, bad=marks))
    assert storage.size(".ckpt-suite/damaged.json") <= MAX_MARKS_BYTES
    for kept in (read_marks(storage).damaged, read_marks(storage).bad):
        assert len(kept) == MAX_MARKS
        assert min(mark.found for mark in kept.values()) == 10_000 - MAX_MARKS
    catalog = Catalog(storage)
    catalog.mark_damaged(ONE, "x" * 10_000_000)
    assert catalog.known_damage(ONE) == "x" * 400


def test_names_that_are_no_valid_unicode_can_be_marked(tmp_path):
    storage, name = LocalStorage(tmp_path), "odd-\udcff"
    save(storage, 1, name=name)
    Catalog(storage).mark_damaged(name, PROBLEM)
    assert marked(storage) == {name: PROBLEM}


def sealed(fields):
    return codec.add_checksum(json.dumps({"format_version": 1, **fields}).encode())


HOSTILE = {
    "empty": b"",
    "zeros": b"\0" * 100,
    "nested": b"[" * 100_000,
    "huge": b" " * (MAX_MARKS_BYTES + 1),
    "not unicode": b"\xff",
    "without checksum": json.dumps({"format_version": 1, "checkpoints": {}}).encode(),
    "no marks": sealed({}),
    "a list": sealed({"checkpoints": []}),
    "no object": sealed({"checkpoints": {ONE: "x"}}),
    "no problem": sealed({"checkpoints": {ONE: {"save_id": "00000001", "found": 1}}}),
    "another type": sealed({"checkpoints": {ONE: {"save_id": 1, "problem": "x", "found": 1}}}),
    "no time": sealed({"checkpoints": {ONE: {"save_id": "00000001", "problem": "x", "found": "now"}}}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_unreadable_marks_are_no_marks_and_the_next_mark_replaces_them(storage, content, caplog):
    storage.replace(".ckpt-suite/damaged.json", content)
    catalog = Catalog(storage)
    assert marked(storage) == {}
    assert [info.step for info in catalog.committed()] == [1, 2]
    assert catalog.known_damage(ONE) is None
    assert "nothing counts as damaged" in caplog.text
    catalog.unmark(ONE)
    catalog.mark_damaged(TWO, PROBLEM)
    assert marked(storage) == {TWO: PROBLEM}


def test_marks_of_a_newer_version_are_not_known_and_not_overwritten(storage, caplog):
    content = sealed({"format_version": 99})
    storage.replace(".ckpt-suite/damaged.json", content)
    assert marked(storage) == {}
    assert "upgrade" in caplog.text
    with pytest.raises(IncompatibleCheckpointError, match="upgrade"):
        Catalog(storage).mark_damaged(ONE, PROBLEM)
    with pytest.raises(IncompatibleCheckpointError, match="upgrade"):
        Catalog(storage).unmark(ONE)
    assert storage.read_bytes(".ckpt-suite/damaged.json") == content


def test_marks_that_storage_cannot_read_hide_no_checkpoint(tmp_path, caplog):
    storage = LocalStorage(tmp_path)
    save(storage, 1)
    (tmp_path / ".ckpt-suite/damaged.json").mkdir(parents=True)
    assert [(info.step, info.damaged) for info in Catalog(storage).committed()] == [(1, None)]
    assert "damaged.json cannot be read" in caplog.text


def test_no_flipped_bit_turns_a_mark_into_that_of_another_checkpoint(storage):
    Catalog(storage).mark_damaged(TWO, PROBLEM)
    content, chance = storage.read_bytes(".ckpt-suite/damaged.json"), random.Random(3)
    for _ in range(300):
        place, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        storage.replace(
            ".ckpt-suite/damaged.json", content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
        )
        assert marked(storage) in ({}, {TWO: PROBLEM})


def test_a_listing_shows_the_old_marks_or_the_new_ones(tmp_path):
    """The file is replaced as a whole: one who has it open goes on to read what was there."""
    storage = LocalStorage(tmp_path)
    save(storage, 1)
    Catalog(storage).mark_damaged(ONE, "old")
    with storage.open(".ckpt-suite/damaged.json") as before:
        Catalog(storage).mark_damaged(ONE, "new")
        assert b'"old"' in before.read()
    assert marked(storage) == {ONE: "new"}
