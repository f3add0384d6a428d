"""`replicas=2`: whichever file, or all files of whichever host, are lost or damaged, loads are exact."""

from __future__ import annotations

import json
import logging
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import CheckpointManager, KeepLatest
from ckpt_core.cli._main import main
from ckpt_core.commit import Catalog, verify
from ckpt_core.errors import NoRoomError, lost
from ckpt_core.formats.chunks import decode_table
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import FaultyStorage
from tests.guarantees.replica_jobs import MARKER, TWIN, partner_dies, whoever
from tests.kit.memory import MemoryStorage
from tests.kit.ranks import run_ranks
from tests.support.thorough import THOROUGH
from tests.unit.commit.checkpoints import bucket_like, posix_like

NAME = "step-000000002"
DATA = f"{NAME}/__0_0.distcp"


@pytest.fixture(params=[posix_like, bucket_like])
def storage(request) -> Storage:
    return request.param()


def state_of(step: float):
    generator = torch.Generator().manual_seed(int(step))
    return {
        "large": torch.randn(600_000, generator=generator),  # several blocks
        "small": {f"t{n}": torch.randn(50 + n, generator=generator) for n in range(4)},
        "empty": torch.empty(0),
        "note": {"step": step, "text": "x" * int(step)},
    }


def is_equal(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def save_all(storage, *steps, **options):
    with CheckpointManager(storage, **{"replicas": 2, **options}) as manager:
        for step in steps:
            manager.save(step, state_of(step))
        manager.wait()


def loads(storage, step=2, **options) -> bool:
    state = state_of(0)
    with CheckpointManager(storage, **options) as manager:
        return manager.resume(state) == step and is_equal(state, state_of(step))


def files(storage) -> list[str]:
    """Every file but the marker, which is the commit."""
    return [f"{NAME}/{each.name}" for each in storage.list(NAME) if each.name != MARKER]


def flip(storage, key, at):
    content = bytearray(storage.read_bytes(key))
    content[at] ^= 0x10
    storage.replace(key, bytes(content))


def damage(storage, key, chance):
    content = storage.read_bytes(key)
    kind = chance.choice(["flip", "hole", "cut", "delete"])
    if kind == "flip":
        flip(storage, key, chance.randrange(len(content)))
    elif kind == "hole":
        start = chance.randrange(len(content))
        storage.replace(
            key, content[:start] + bytes(len(content[start : start + 9000])) + content[start + 9000 :]
        )
    elif kind == "cut":
        storage.replace(key, content[: chance.randrange(len(content))])
    else:
        storage.delete(key)


def marks(storage) -> list[str | None]:
    return [info.damaged for info in Catalog(storage).committed()]


def test_any_one_file_may_be_lost_or_damaged_and_the_checkpoint_still_loads_bit_for_bit(storage):
    save_all(storage, 1, 2)
    chance = random.Random(20261122)
    for key in files(storage):
        content = storage.read_bytes(key)
        damage(storage, key, chance)
        assert loads(storage), key
        storage.delete(key) if storage.exists(key) else None
        storage.write_bytes(key, content)
    assert marks(storage) == [None, None]


@pytest.mark.parametrize("kept", ["own", "twins"])
def test_all_own_files_or_all_twins_may_be_lost(storage, kept):
    save_all(storage, 2, checksum="sha256")
    for key in files(storage):
        if key.endswith(TWIN) == (kept == "own"):
            storage.delete(key)
    for mode in ("read", "full"):
        assert loads(storage, verify=mode)


def test_signatures_have_twins_too(storage):
    def sign(_: str, manifest: bytes) -> bytes:
        return b"signed " + manifest

    def judge(_: str, manifest: bytes, signature: bytes) -> bool:
        return signature == b"signed " + manifest

    save_all(storage, 2, sign_manifest=sign)
    for key in (f"{NAME}/manifest.json.sig", f"{NAME}/manifest.json"):
        for lose in (lambda key: flip(storage, key, 30), storage.delete):
            content = storage.read_bytes(key)
            lose(key)
            assert loads(storage, verify_manifest=judge)
            storage.delete(key) if storage.exists(key) else None
            storage.write_bytes(key, content)
    storage.delete(f"{NAME}/manifest.json")
    with CheckpointManager(storage) as manager:
        assert [failure.twin for failure in manager.verify(2)] == ["manifest.json.replica"]


def test_twins_are_pruned_replaced_and_collected_with_the_checkpoint(storage):
    save_all(storage, 1, 2, 3, keep=KeepLatest(1))
    assert sorted(name for name in storage.directories("") if name.startswith("step")) == ["step-000000003"]
    if storage.supports_rename:
        with CheckpointManager(storage, replicas=2) as manager:
            manager.resume(state_of(0))
            for _ in range(2):
                manager.save(4, state_of(4), name="best").committed.result(30)
        assert len([each for each in storage.list("best") if each.name.endswith(TWIN)]) == 7
    assert not [
        each for name in storage.directories("") for each in storage.list(name) if "yours" in each.name
    ]


def test_lost_files_are_replaced_whatever_verify_says(storage):
    save_all(storage, 1, 2)
    storage.delete(DATA)
    storage.delete(f"{NAME}/__0_1.distcp")
    for mode in ("off", "read", "full"):
        assert loads(storage, verify=mode)


def test_a_save_is_refused_if_there_is_room_for_one_file_of_each_only():
    save_all(probe := posix_like(), 2)
    size = Catalog(probe).committed()[0].size_bytes
    storage = MemoryStorage(capacity_bytes=int(0.75 * size), capacity_files=1000)
    save_all(storage, 2, replicas=1, headroom=0)
    storage.delete(NAME)
    with pytest.raises(NoRoomError, match="Nothing was written"):
        save_all(storage, 2, headroom=0)


def chunks(storage) -> dict[str, int]:
    """Name of every tensor -> position of its first byte in the data file."""
    table = json.loads(decode_table(storage.read_bytes(f"{NAME}/chunks-00000.json.z")))["files"]
    columns = next(each["chunks"] for each in table if each["path"] == "__0_0.distcp")
    return dict(zip(columns["key"], columns["payload_offset"], strict=True))


def test_both_files_may_be_damaged_as_long_as_no_chunk_is_damaged_in_both(storage):
    save_all(storage, 1, 2)
    at = chunks(storage)
    flip(storage, DATA, at["small.t1"])
    flip(storage, DATA + TWIN, at["large"] + 2_000_000)
    assert loads(storage)
    with CheckpointManager(storage) as manager:
        failures = manager.verify(2)
    assert [failure.twin for failure in failures] == ["__0_0.distcp.replica", "__0_0.distcp"]
    assert marks(storage) == [None, None]


def test_verify_and_load_agree_on_what_is_lost_whatever_is_damaged():
    save_all(storage := posix_like(), 1, 2)
    content, chance = {key: storage.read_bytes(key) for key in files(storage)}, random.Random(14)
    for _ in range(100 if THOROUGH else 12):
        for key in chance.sample(sorted(content), chance.randint(1, 5)):
            damage(storage, key, chance)
        whole = not lost(verify(storage, NAME))
        assert loads(storage, step=1 + whole, verify=chance.choice(["read", "full"]))
        Catalog(storage).unmark(NAME)
        for key, original in content.items():
            storage.replace(key, original)


def test_a_chunk_that_is_damaged_in_both_files_makes_a_resume_take_the_step_before(storage, caplog):
    save_all(storage, 1, 2)
    at = chunks(storage)["small.t1"]
    flip(storage, DATA, at)
    flip(storage, DATA + TWIN, at + 1)
    assert loads(storage, step=1)
    assert "'small.t1'" in caplog.text
    assert [bool(mark) for mark in marks(storage)] == [False, True]
    with CheckpointManager(storage) as manager:
        assert [failure.twin for failure in manager.verify(2)] == ["", ""]


def test_what_a_load_reads_from_a_second_file_is_logged_with_both_paths(storage, caplog):
    save_all(storage, 2)
    flip(storage, DATA, chunks(storage)["small.t1"])
    storage.delete(f"{NAME}/rank-00000.json")
    assert loads(storage)
    assert f"{storage.url}/{NAME} is damaged" in caplog.text
    for text in (
        "__0_0.distcp: tensor 'small.t1'",
        "__0_0.distcp.replica",
        "rank-00000.json: missing",
        "ckpt verify",
    ):
        assert text in caplog.text


def test_a_load_of_what_is_whole_reads_no_second_file(storage):
    save_all(storage, 2)
    for mode in ("read", "off"):
        watched = FaultyStorage(storage)
        assert loads(watched, verify=mode)
        assert not [each for each in watched.operations if each.key.endswith(TWIN)]


def test_without_replicas_nothing_of_them_is_written(storage):
    with CheckpointManager(storage) as manager:
        manager.save(2, state_of(2))
        manager.wait()
        assert manager._saver._means.partners is None
    assert not [key for key in files(storage) if TWIN in key]
    assert "replicas" not in json.loads(storage.read_bytes(f"{NAME}/manifest.json"))


def test_a_prune_counts_a_checkpoint_that_twins_make_whole(storage):
    save_all(storage, 1, 2)
    flip(storage, DATA, chunks(storage)["large"])
    with CheckpointManager(storage, keep=KeepLatest(1)) as manager:
        assert [info.step for info in manager.prune().drop] == [1]
    assert loads(storage)


def test_stock_dcp_reads_it(tmp_path):
    save_all(tmp_path, 2)
    state = state_of(0)
    dcp.load(state, checkpoint_id=tmp_path / NAME, no_dist=True)
    assert is_equal(state["small"], state_of(2)["small"])


def test_verify_says_what_to_repair_and_fails_only_if_strict_or_if_both_files_are_damaged(tmp_path, capsys):
    save_all(tmp_path, 2)
    storage, place = LocalStorage(tmp_path), str(tmp_path / NAME)

    def verified(*options: str) -> tuple[int, str]:
        code = main(["verify", place, *options])
        return code, capsys.readouterr().out

    assert verified()[0] == 0
    assert verified()[1].startswith("ok ")
    at = chunks(storage)["small.t2"]
    flip(storage, DATA, at)
    code, text = verified()
    assert (code, text.split()[0]) == (0, "REPAIR")
    assert "whole in __0_0.distcp.replica" in text
    assert verified("--strict")[0] == 1
    assert json.loads(verified("--json")[1])["checkpoints"][0]["ok"]
    flip(storage, DATA + TWIN, at)
    code, text = verified()
    assert (code, text.split()[0]) == (1, "FAILED")


def test_a_second_manifest_that_is_lost_is_found(tmp_path, capsys):
    save_all(tmp_path, 2)
    (tmp_path / NAME / f"manifest.json{TWIN}").unlink()
    assert main(["verify", str(tmp_path / NAME)]) == 0
    assert capsys.readouterr().out.startswith("REPAIR")
    assert main(["verify", str(tmp_path / NAME), "--strict"]) == 1


def test_what_second_files_take_is_shown(tmp_path, capsys):
    save_all(tmp_path, 2)
    place = str(tmp_path / NAME)
    assert main(["show", place]) == 0
    assert "2, the second files take" in capsys.readouterr().out


def test_what_more_is_written_is_told_once_in_bytes_and_that_one_host_is_one(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        save_all(tmp_path, 1, 2)
    assert caplog.text.count("more are written in each save, as second files") == 1
    assert caplog.text.count("the only rank runs on one host") == 1
    told = next(record for record in caplog.records if "second files, to" in record.message)
    assert "MiB" in told.getMessage() or "MB" in told.getMessage()


@pytest.mark.distributed
def test_ranks_of_two_hosts_lose_all_files_of_one_fail_alone_and_must_agree(tmp_path):
    for found in run_ranks(whoever, 2, str(tmp_path), timeout_seconds=120):
        assert found["lost"] == {f"{each}/{lost}": ["2"] for each in ("fsdp2", "ddp") for lost in (0, 1)}
        error, steps, failures = found["fails"]
        assert "rank 0" in error
        assert "rank 1 could not write the twin of __0_0.distcp" in error
        assert "No space left" in error
        assert (steps, failures) == ([2], [])
        error, steps, threads = found["hangs"]
        assert "the twins of its files, which rank 0 writes because of replicas=2" in error
        assert "was taken for 2 s" in error
        assert (steps, threads) == ([2], [])
        assert "replicas is 1 on rank 0, 2 on rank 1" in found["disagree"]


@pytest.mark.distributed
@pytest.mark.parametrize("who", [0, 1])
def test_a_partner_that_dies_during_the_transfer_ends_the_save_in_time_without_a_commit(tmp_path, who):
    survivor = run_ranks(partner_dies, 2, str(tmp_path), who, expect_death=[who], timeout_seconds=60)[1 - who]
    kind, text, steps = survivor
    assert kind == "SaveError"
    assert f"{who}" in text
    assert steps == [1]
    state = {"w": torch.zeros(1000), "by_rank": torch.zeros(5)}
    with CheckpointManager(tmp_path) as manager:
        assert manager.resume(state) == 1
    assert state["w"][0] == 1
