"""Partners on other hosts, and the files that they write."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.coordination import Talks
from ckpt_core.errors import SaveError
from ckpt_core.groups import RemoteDisk, serve_disk
from ckpt_core.saving._reports import ReportCache
from ckpt_core.saving._twins import TwinSession, choose_partners, host_name
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.memory import MemoryStorage
from tests.kit.talks import talks_of


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=24))
def test_a_partner_is_on_another_host_and_of_one_rank_only_wherever_that_is_possible(hosts):
    partners = choose_partners(hosts)
    if len(set(hosts)) > 1:
        assert all(hosts[rank] != hosts[partner] for rank, partner in enumerate(partners))
    elif len(hosts) > 1:
        assert all(rank != partner for rank, partner in enumerate(partners))
    if 2 * max(Counter(hosts).values()) <= len(hosts) or len(set(hosts)) == 1:
        assert sorted(partners) == list(range(len(hosts)))
    assert partners == choose_partners(hosts)


def test_the_name_of_a_host_may_be_given(monkeypatch):
    assert host_name()
    monkeypatch.setenv("CKPT_SUITE_HOST", "rack-7")
    assert host_name() == "rack-7"


@pytest.fixture
def pair() -> Iterator[list[Talks]]:
    made = talks_of(2, 5.0)
    yield made
    for each in made:
        each.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("ckpt-t")]


def session(pair, storage) -> TwinSession:
    """The twins of rank 0, which rank 1 writes."""
    serve_disk(storage, pair[1])
    disk = RemoteDisk(pair[0], 1, storage.url)
    return TwinSession(disk, "rank 1", "w", ReportCache(), patience_seconds=5.0)


def test_the_twin_has_the_bytes_that_were_sent(pair):
    storage = MemoryStorage()
    sent = [bytes([n]) * size for n, size in enumerate((1 << 20, 5, 0))]
    with session(pair, storage) as twins:
        assert list(twins.follow("part/__0_0.distcp", map(memoryview, sent))) == sent
        twins.add("empty", b"")
        twins.finish()
    assert storage.read_bytes("w/part/__0_0.distcp.replica") == b"".join(sent)
    assert storage.read_bytes("w/empty.replica") == b""


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../../x"])
def test_no_path_leads_out_of_the_root(pair, path):
    storage = MemoryStorage()
    with session(pair, storage) as twins:
        twins.add(path, b"1")
        with pytest.raises(SaveError, match="could not write the twin of"):
            twins.finish()
    assert storage.list("") == []


def test_after_an_error_no_more_is_written_and_no_piece_is_in_use(pair):
    full = OSError(28, "No space left on device")
    storage = FaultyStorage(MemoryStorage(), [Fault(method="write", key="*first*", error=full)])
    with session(pair, storage) as twins:
        twins.add("first", b"1" * 5000)
        twins.add("second", b"2")
        with pytest.raises(SaveError, match=r"rank 1 could not write the twin of first: .*No space left"):
            twins.finish()
    assert not storage.exists("w/second.replica")


def test_what_was_stopped_in_the_middle_of_a_file_is_not_complete_and_the_next_save_is(pair):
    storage = MemoryStorage()
    with session(pair, storage) as twins:
        pieces = iter(twins.follow("half", map(memoryview, [b"1" * 4096, b"2" * 4096])))
        next(pieces)
        twins.stop()
    assert not storage.exists("w/half.replica")
    with TwinSession(
        RemoteDisk(pair[0], 1, storage.url), "rank 1", "w", ReportCache(), patience_seconds=5.0
    ) as twins:
        twins.add("whole", b"3")
        twins.finish()
    assert storage.read_bytes("w/whole.replica") == b"3"
