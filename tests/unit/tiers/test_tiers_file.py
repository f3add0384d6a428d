"""The file that names the tiers of a root."""

from __future__ import annotations

import pytest

from ckpt_core.errors import CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.tiers import TierRecord, Uploading, read_tiers, write_tiers
from tests.kit.memory import MemoryStorage

RECORDS = [
    TierRecord(
        url="s3://bucket/run",
        every=10,
        due=("step-000000020", "odd-\udcff"),
        uploading=Uploading(name="step-000000020", done_bytes=3, size_bytes=9),
    ),
    TierRecord(url="/mnt/share/run"),
]


def test_tiers_read_back_as_written_and_none_where_nothing_was_written():
    storage = MemoryStorage()
    assert read_tiers(storage) == []
    write_tiers(storage, RECORDS)
    assert read_tiers(storage) == RECORDS
    write_tiers(storage, [])
    assert read_tiers(storage) == []


def test_a_file_of_tiers_that_was_changed_or_is_newer_is_refused():
    storage = MemoryStorage()
    write_tiers(storage, RECORDS)
    content = storage.read_bytes(".ckpt-suite/tiers.json")
    for wrong in (content[:-9], content.replace(b"bucket", b"other!"), b"{}", b"[", b"\xff" * 9):
        storage.replace(".ckpt-suite/tiers.json", wrong)
        with pytest.raises(CorruptCheckpointError):
            read_tiers(storage)
    storage.replace(".ckpt-suite/tiers.json", b'{"format_version":99}')
    with pytest.raises((CorruptCheckpointError, IncompatibleCheckpointError)):
        read_tiers(storage)
