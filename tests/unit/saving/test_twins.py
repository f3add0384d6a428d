"""Partners on other hosts, and connections that only they can make."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.coordination import Addressee, Greeting, Signer
from ckpt_core.errors import SaveError
from ckpt_core.saving._reports import ReportCache
from ckpt_core.saving.twins._hosts import choose_partners, host_name
from ckpt_core.saving.twins._incoming import Incoming
from ckpt_core.saving.twins._outgoing import Outgoing, RemoteWriter
from ckpt_core.saving.twins._twin_files import PieceMemory, TwinFiles
from ckpt_core.storage import MemoryStorage

SIGNER = Signer(b"the secret of the job", "twins")


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
def partner():
    """Rank 1, which has begun the save `aaaa`; and its storage."""
    storage, incoming = MemoryStorage(), Incoming(1, SIGNER)
    storage.make_directory("w")
    incoming.start(1)
    incoming.begin("aaaa", TwinFiles(storage, "w", ReportCache()))
    yield incoming, storage
    incoming.close(10)
    assert not [each for each in threading.enumerate() if "twin" in each.name]


def outgoing(port, *, signer=SIGNER, save_id="aaaa", rank=0, seconds=5.0):
    greeting = Greeting(signer=signer, rank=rank, topic=save_id)
    made = Outgoing(RemoteWriter(Addressee(1, ["127.0.0.1"], port), greeting, seconds), "rank 1")
    threading.Thread(target=made.run, daemon=True).start()
    return made


def test_the_twin_has_the_bytes_that_were_sent(partner):
    incoming, storage = partner
    sent = [bytes([n]) * size for n, size in enumerate((1 << 20, 5, 0))]
    files = outgoing(incoming.port)
    assert list(files.follow("part/__0_0.distcp", map(memoryview, sent))) == sent
    files.add("empty", b"")
    files.finish(lambda _: None)
    assert storage.read_bytes("w/part/__0_0.distcp.replica") == b"".join(sent)
    assert storage.read_bytes("w/empty.replica") == b""
    files.stop()


@pytest.mark.parametrize(
    "stranger",
    [
        {"signer": Signer(b"another secret", "twins")},
        {"signer": Signer(b"the secret of the job", "else")},
    ],
)
def test_without_the_secret_of_the_job_nothing_is_written(partner, stranger):
    incoming, storage = partner
    files = outgoing(incoming.port, seconds=0.3, **stranger)
    files.add("x", b"1")
    with pytest.raises(SaveError, match="not reached"):
        files.finish(lambda _: None)
    files.stop()
    assert not storage.exists("w/x.replica")


def test_bytes_are_sent_to_the_partner_only():
    """Whoever listens at its port and does not know the secret gets no more than a greeting."""
    heard = bytearray()

    def listen() -> None:
        connection, _ = listener.accept()
        with closing(connection):
            connection.sendall(b"\0\0\0\4abcd")
            while got := connection.recv(4096):
                heard.extend(got)
                if b"nonce" in heard:
                    connection.sendall(b"\0\0\0\x28" + bytes(40))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=listen)
        thread.start()
        files = outgoing(listener.getsockname()[1], seconds=0.3)
        files.add("x", b"the weights")
        with pytest.raises(SaveError, match="not reached"):
            files.finish(lambda _: None)
        files.stop()
        thread.join()
    assert b"nonce" in heard
    assert b"the weights" not in heard


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "COMMITTED/\n"])
def test_no_path_leads_out_of_the_directory_of_the_save(partner, path):
    incoming, storage = partner
    files = outgoing(incoming.port)
    files.add(path, b"1")
    with pytest.raises(SaveError, match="not a relative path"):
        files.finish(lambda _: None)
    files.stop()
    assert storage.list("w") == []


def test_a_connection_for_a_save_that_is_over_is_refused_and_one_for_a_later_save_waits(partner):
    incoming, storage = partner
    incoming.end("aaaa")
    late = outgoing(incoming.port, seconds=0.3)
    late.add("late", b"1")
    with pytest.raises(SaveError, match="not reached"):
        late.finish(lambda _: None)
    late.stop()
    early = outgoing(incoming.port, save_id="bbbb")
    early.add("early", b"2")
    incoming.begin("bbbb", TwinFiles(storage, "w", ReportCache()))
    early.finish(lambda _: None)
    early.stop()
    assert [each.name for each in storage.list("w")] == ["early.replica"]


def test_memory_of_a_piece_is_used_again_only_when_nothing_refers_to_it():
    memory = PieceMemory(8192)
    first = memory.take()
    part = first[100:200]
    part[:] = b"1" * 100
    del first
    second = memory.take()
    second[:] = b"2" * 8192
    assert bytes(part) == b"1" * 100
    del part, second
    assert len(memory._free) == 2
    third, fourth = memory.take(), memory.take()
    assert len(memory._free) == 0
    assert len(third) == len(fourth) == 8192
