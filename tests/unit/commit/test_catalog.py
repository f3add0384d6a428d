from __future__ import annotations

import json

import pytest

from ckpt_core.commit import Catalog, begin, collect_orphans, quarantine, verify
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import FaultyStorage
from tests.unit.commit.checkpoints import bucket_like, posix_like, save, write_files


@pytest.fixture(params=[posix_like, bucket_like])
def storage(request):
    return request.param()


def test_an_empty_root_has_no_checkpoints(storage):
    catalog = Catalog(storage)
    assert (catalog.committed(), catalog.latest(), catalog.torn(), catalog.pins()) == ([], None, [], {})
    with pytest.raises(CheckpointNotFoundError, match="committed steps there: none"):
        catalog.find(step=1)


def test_checkpoints_are_sorted_by_step_whatever_their_names(storage):
    save(storage, 20, name="checkpoint-20")
    save(storage, 3)
    save(storage, 100, name="a")
    catalog = Catalog(storage)
    assert [(info.step, info.name) for info in catalog.committed()] == [
        (3, "step-000000003"),
        (20, "checkpoint-20"),
        (100, "a"),
    ]
    assert catalog.latest() == catalog.find(name="a") == catalog.find(step=100)


def test_metrics_and_sizes_come_from_the_marker_alone(storage):
    save(storage, 3, metrics={"val_loss": 0.25})
    storage.delete("step-000000003/manifest.json")
    (info,) = Catalog(storage).committed()
    assert info.metrics == {"val_loss": 0.25}
    assert (info.size_bytes > 0, info.world_size, info.created) == (True, 2, 1_700_000_003.0)


def test_a_listing_reads_one_small_file_per_checkpoint():
    storage = FaultyStorage(posix_like())
    for step in range(5):
        save(storage, step)
    before = len(storage.operations)
    Catalog(storage).committed()
    opened = [o.key for o in storage.operations[before:] if o.method == "open"]
    small = [".ckpt-suite/damaged.json", ".ckpt-suite/pins.json"]
    assert sorted(opened) == sorted([*small, *(f"step-00000000{i}/COMMITTED" for i in range(5))])


def test_what_is_missing_is_named_with_what_is_there(storage):
    save(storage, 1)
    save(storage, 2)
    with pytest.raises(CheckpointNotFoundError, match=r"no committed step 3 .*: 1, 2"):
        Catalog(storage).find(step=3)
    with pytest.raises(CheckpointNotFoundError, match=r"checkpoint 'x' .*: 1, 2"):
        Catalog(storage).find(name="x")


@pytest.mark.parametrize(
    "name",
    [
        ".incomplete-0123456789abcdef-step-000000009",
        ".trash-01234567-step-000000009",
    ],
)
def test_a_marker_in_a_passing_directory_does_not_count(storage, name):
    info = save(storage, 9)
    for path in ("COMMITTED", "manifest.json"):
        storage.write_bytes(f"{name}/{path}", storage.read_bytes(f"{info.name}/{path}"))
    storage.delete(info.name)
    catalog = Catalog(storage)
    assert catalog.committed() == []
    assert catalog.torn() == [name]
    with pytest.raises(CheckpointNotFoundError):
        catalog.manifest(name)


def test_a_quarantined_checkpoint_makes_way_for_a_new_one(storage):
    info = save(storage, 9)
    moved = quarantine(storage, info.name)
    assert Catalog(storage).committed() == []
    if storage.supports_rename:
        assert collect_orphans(storage, keep=()) == []
        assert storage.exists(f"{moved}/__0_0.distcp")
    assert save(storage, 9) == info
    assert verify(storage, info.name) == []


@pytest.mark.parametrize(
    "marker",
    [
        b"",
        b"{}",
        b"\0" * 100,
        b"[" * 100_000,
        b"x" * (2 << 20),
        b'{"format_version": 99}',
        b'{"format_version": 1}',
    ],
    ids=["empty", "no fields", "zeros", "nested", "huge", "newer", "half"],
)
def test_a_hostile_marker_is_left_out_with_a_warning(storage, marker, caplog):
    save(storage, 1)
    storage.write_bytes("step-000000002/COMMITTED", marker)
    assert [info.step for info in Catalog(storage).committed()] == [1]
    assert "step-000000002 is left out" in caplog.text


def test_a_newer_marker_asks_for_an_upgrade(storage):
    storage.write_bytes("step-000000002/COMMITTED", b'{"format_version": 99}')
    with pytest.raises(IncompatibleCheckpointError, match="upgrade"):
        Catalog(storage).manifest("step-000000002")


def test_a_marker_that_cannot_be_opened_hides_only_its_own_checkpoint(tmp_path, caplog):
    storage = LocalStorage(tmp_path)
    save(storage, 1)
    (tmp_path / "odd" / "COMMITTED").mkdir(parents=True)
    (tmp_path / "a file").write_text("x")
    assert [info.step for info in Catalog(storage).committed()] == [1]
    assert "odd is left out" in caplog.text


def test_a_manifest_that_was_changed_is_refused(storage):
    info = save(storage, 1)
    content = storage.read_bytes(f"{info.name}/manifest.json")
    storage.replace(f"{info.name}/manifest.json", content.replace(b'"step":1', b'"step":2'))
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json: not the file that was committed"):
        Catalog(storage).manifest(info.name)
    storage.delete(f"{info.name}/manifest.json")
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json: missing"):
        Catalog(storage).manifest(info.name)


def test_torn_directories_are_told_from_foreign_ones(storage):
    save(storage, 1)
    working = begin(storage, "step-000000002", "abcdef01")
    write_files(storage, working)
    storage.write_bytes("tensorboard/events", b"foreign")
    storage.write_bytes("checkpoint-5/model.safetensors", b"foreign")
    assert Catalog(storage).torn() == [working]


def test_orphans_are_collected_but_not_what_is_kept_or_foreign(storage):
    save(storage, 1)
    in_flight = begin(storage, "step-000000002", "abcdef01")
    write_files(storage, in_flight)
    for name in (
        ".incomplete-deadbeef-step-000000004",
        ".incomplete-deadbeef-step-000000003",
        ".trash-deadbeef-step-000000001",
    ):
        storage.write_bytes(f"{name}/__0_0.distcp", b"torn")
    for name in ("tensorboard", "step-3", "checkpoint-5", "step-000000004.incomplete-xyz", "old.trash"):
        storage.write_bytes(f"{name}/file", b"foreign")
    before = {entry.name for entry in storage.list("")}
    removed = collect_orphans(storage, keep={in_flight})
    assert removed == [
        ".incomplete-deadbeef-step-000000003",
        ".incomplete-deadbeef-step-000000004",
        ".trash-deadbeef-step-000000001",
    ]
    assert {entry.name for entry in storage.list("")} == before - set(removed)


def test_pins_are_kept_with_their_reasons(storage):
    save(storage, 1)
    save(storage, 2)
    catalog = Catalog(storage)
    catalog.pin(1, "paper")
    catalog.pin(2, "demo")
    catalog.pin(2, "better demo")
    assert catalog.pins() == {1: "paper", 2: "better demo"}
    assert [info.pinned for info in catalog.committed()] == ["paper", "better demo"]
    catalog.unpin(1)
    catalog.unpin(1)
    assert [info.pinned for info in catalog.committed()] == [None, "better demo"]


def test_only_a_committed_step_can_be_pinned(storage):
    with pytest.raises(CheckpointNotFoundError):
        Catalog(storage).pin(1, "paper")
    assert not storage.exists(".ckpt-suite/pins.json")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"pins": []}', b'{"pins": {"one": "x"}}', b"\xff"])
def test_unreadable_pins_keep_every_checkpoint(storage, content, caplog):
    save(storage, 1)
    storage.replace(".ckpt-suite/pins.json", content)
    catalog = Catalog(storage)
    (info,) = catalog.committed()
    assert info.pinned is not None
    assert "cannot be read" in info.pinned
    assert "no checkpoint is pruned" in caplog.text
    with pytest.raises(CorruptCheckpointError, match=r"pins\.json"):
        catalog.pin(1, "paper")
    assert storage.read_bytes(".ckpt-suite/pins.json") == content


@pytest.mark.parametrize("name", [".ckpt-suite/pins.json", ".ckpt-suite/damaged.json"])
def test_a_file_that_cannot_be_read_is_warned_of_once_for_each_content(storage, name, caplog):
    save(storage, 1)
    told = []
    for content in (b"{nonsense", b"{nonsense", b"", None, b""):
        if content is None:
            storage.delete(name)
        else:
            storage.replace(name, content)
        for _ in range(3):
            Catalog(storage).committed()
        told.append(caplog.text.count("cannot be read, so that"))
    assert told == [1, 1, 2, 2, 3]


def test_pins_are_plain_json_that_a_person_can_edit(storage):
    save(storage, 12)
    Catalog(storage).pin(12, "paper")
    assert json.loads(storage.read_bytes(".ckpt-suite/pins.json")) == {"pins": {"12": "paper"}}
