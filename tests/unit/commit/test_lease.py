from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from ckpt_core.commit import Lease, Owner
from ckpt_core.errors import RootBusyError
from ckpt_core.groups import GroupedStorage
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.unit.commit.checkpoints import bucket_like, posix_like


@pytest.fixture(params=[posix_like, bucket_like])
def storage(request):
    return request.param()


def test_a_root_says_who_writes_to_it(storage):
    assert Owner.of(storage) is None
    with Lease.acquire(storage, "job 42") as lease:
        assert Owner.of(storage) == lease.owner
        assert lease.owner.job == "job 42"
        assert lease.is_held()
        lease.check()
    assert Owner.of(storage) is None


def test_a_second_live_job_is_refused_with_the_name_of_the_first():
    storage = posix_like()
    with Lease.acquire(storage, "job 42") as lease:
        other = replace(lease.owner, pid=lease.owner.pid + 1)
        storage.replace(".ckpt-suite/writer.json", json.dumps(asdict(other)).encode())
        with pytest.raises(
            RootBusyError, match=rf"job 42 \(host .*, pid {other.pid}, started .*another root"
        ):
            Lease.acquire(storage, "job 43")
        storage.replace(".ckpt-suite/writer.json", json.dumps(asdict(lease.owner)).encode())
        assert lease.is_held()
    Lease.acquire(storage, "job 43").release()


def test_a_second_process_is_refused_until_the_first_dies(tmp_path):
    program = (
        "import sys\n"
        "from ckpt_core.commit import Lease\n"
        "from ckpt_core.storage import LocalStorage\n"
        "lease = Lease.acquire(LocalStorage(sys.argv[1]), 'the first')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout.readline() == b"ready\n"
        with pytest.raises(RootBusyError, match=rf"the first \(host .*, pid {first.pid}"):
            Lease.acquire(LocalStorage(tmp_path), "the second")
        first.kill()
        first.wait(30)
        with Lease.acquire(LocalStorage(tmp_path), "the second") as lease:
            lease.check()


def test_a_job_that_was_replaced_stops_and_says_who_took_over():
    storage = bucket_like()
    old = Lease.acquire(storage, "old job")
    new = Lease.acquire(storage, "new job")
    assert not old.is_held()
    with pytest.raises(RootBusyError, match=r"taken over by new job \(host .*; this job stopped saving"):
        old.check()
    old.release()
    new.check()


def test_a_removed_claim_stops_the_job_too(storage):
    lease = Lease.acquire(storage, "job")
    storage.delete(".ckpt-suite/writer.json")
    with pytest.raises(RootBusyError, match="its claim was removed"):
        lease.check()


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("taker", [None, "another job"])
def test_a_job_owns_a_root_for_as_long_as_it_owns_the_disk_of_every_node(lost, taker):
    disks = [posix_like() for _ in range(3)]
    storage = GroupedStorage(disks[0])
    lease = Lease.acquire(storage, "job")
    storage.join(0, [1, 1, 1], disks[1:])
    for disk in disks[1:]:
        lease.extend(disk)
    lease.check()
    disks[lost].delete(".ckpt-suite/writer.json")
    if taker is not None:
        claim = json.dumps(asdict(Owner.here(taker)))
        disks[lost].write_bytes(".ckpt-suite/writer.json", claim.encode())
    assert not lease.is_held()
    with pytest.raises(RootBusyError, match=rf"disk {lost} of .*({taker or 'its claim was removed'})"):
        lease.check()
    lease.release()
    assert [disk.exists(".ckpt-suite/writer.json") for disk in disks] == [
        bool(taker) and number == lost for number in range(3)
    ]


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1]", b'{"id": "x"}', b"\xff", b"[" * 100_000]
    + [
        json.dumps({"id": "x", "job": "", "host": "", "pid": 1, "started": s}).encode()
        for s in (1e300, "now")
    ],
)
def test_an_unreadable_claim_neither_blocks_nor_passes_for_ours(storage, content):
    lease = Lease.acquire(storage, "job")
    storage.replace(".ckpt-suite/writer.json", content)
    assert Owner.of(storage) is None
    assert not lease.is_held()
    lease.release()
    Lease.acquire(storage, "next job").check()


def test_releasing_twice_is_harmless(storage):
    lease = Lease.acquire(storage, "job")
    lease.release()
    other = Lease.acquire(storage, "other")
    lease.release()
    other.check()


def test_a_claim_that_cannot_be_written_leaves_the_root_free():
    storage = posix_like()
    with pytest.raises(OSError, match="read-only"):
        Lease.acquire(FaultyStorage(storage, [Fault(method="replace", error=OSError("read-only"))]), "job")
    Lease.acquire(storage, "job").release()


def test_a_claim_that_cannot_be_removed_still_frees_the_root(caplog):
    storage = posix_like()
    lease = Lease.acquire(FaultyStorage(storage, [Fault(method="delete", error=OSError("read-only"))]), "job")
    lease.release()
    assert "read-only" in caplog.text
    Lease.acquire(storage, "job").release()
