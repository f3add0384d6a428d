"""A state that does not fit into the memory given is saved in waves, with all that holds of a save."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckpt_core import CheckpointManager, SaveError, TrainState
from ckpt_core.dcp import _image
from ckpt_core.saving import _stager
from ckpt_core.staging import flat_parts
from ckpt_core.storage import LocalStorage, object_storage
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.faults import kill_process
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LONG = 60.0
KIB, MIB = 1 << 10, 1 << 20
MEMORY = "2560 KiB"
"""Ten windows, each of a piece of 256 KiB, if no tensor is so small that it may lie in two of them."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(_image, "PIECE_BYTES", 256 * KIB)


def floats(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32).view(torch.float32)


def tensors(size_bytes: int, each_bytes: int) -> dict[str, torch.Tensor]:
    return {f"w{at}": floats(each_bytes // 4 + at) for at in range(size_bytes // each_bytes)}


def twice() -> dict[str, torch.Tensor]:
    return tensors(5120 * KIB, 1280 * KIB)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().view(torch.uint8)


def steps(manager: CheckpointManager) -> list[int]:
    return [info.step for info in manager.checkpoints()]


STATES = {
    "twice the memory": (twice, MEMORY),
    "ten times the memory": (lambda: tensors(25 * MIB, 2 * MIB), MEMORY),
    "one tensor larger than the memory": (lambda: {"a": torch.ones(3), "w": floats(1_700_001)}, MEMORY),
    "many small tensors": (lambda: tensors(7 * MIB, 70_004), "3 MiB"),
    "small ones as large as pieces": (lambda: tensors(15 * MIB, MIB - 64), "11 MiB"),
    "rows not in order": (lambda: {"w": floats(1_200_000).view(3, 400, 1000).transpose(0, 2)}, MEMORY),
    "conjugated": (lambda: {"w": torch.randn(700, 1000, dtype=torch.complex64).conj()}, MEMORY),
}


@pytest.mark.parametrize(("state", "memory"), STATES.values(), ids=STATES)
def test_stock_dcp_loads_every_bit_of_what_did_not_fit(tmp_path, state, memory):
    live = state()
    with CheckpointManager(tmp_path, staging_memory=memory) as manager:
        handle = manager.save(1, live)
        kept = {name: each.clone() for name, each in live.items()}
        for each in live.values():
            each.zero_()  # as the next step might
        info = handle.result(LONG)
    found = {name: torch.ones(each.shape, dtype=each.dtype) for name, each in live.items()}
    dcp.load(found, checkpoint_id=tmp_path / info.name)
    for name, each in kept.items():
        assert torch.equal(bits(found[name]), bits(each)), name


def test_the_file_is_the_one_that_memory_for_all_of_it_gives(tmp_path):
    for number, memory in enumerate([None, MEMORY]):
        with CheckpointManager(tmp_path / str(number), staging_memory=memory) as manager:
            manager.save(1, {**twice(), "s": torch.ones(700)})
            manager.wait()
    files = [sorted((tmp_path / place).rglob("*.distcp")) for place in "01"]
    first, second = ([each.read_bytes() for each in found] for found in files)
    assert first == second


@pytest.mark.parametrize("options", [{"checksum": "sha256"}, {"replicas": 2}, {"write_bandwidth": "1 GB/s"}])
def test_memory_is_used_again_only_when_checksum_twin_and_limit_are_done_with_it(tmp_path, options):
    with CheckpointManager(tmp_path, staging_memory=MEMORY, **options) as manager:
        manager.save(1, tensors(25 * MIB, 2 * MIB)).result(LONG)
        assert manager.verify(1) == []  # every file is what its checksum says


def test_one_manager_saves_what_fits_and_what_does_not_in_turn_from_one_memory(tmp_path):
    states = [twice(), {"w": floats(300_000)}, twice(), {"w": floats(100)}]
    with CheckpointManager(tmp_path, staging_memory=MEMORY, arenas=2, keep=None) as manager:
        assert manager.prewarm(states[0]) <= 2560 * KIB
        for step, state in enumerate(states):
            manager.save(step, state)
            assert manager.staging_bytes <= 2560 * KIB
        manager.wait()
        assert [manager.verify(step) for step in range(4)] == [[]] * 4


def test_the_cost_is_told_once_and_counts_as_a_stall(tmp_path, caplog):
    options = {"staging_memory": MEMORY, "staging": "overlapped", "on_stale": "ignore"}
    model = torch.nn.Linear(1000, 1200)
    state = TrainState(model=model, optimizer=torch.optim.SGD(model.parameters()))
    with CheckpointManager(tmp_path, **options) as manager:
        for step in (1, 2):
            handle = manager.save(step, state)
            assert handle.staged.done()  # nothing is copied later
            handle.result(LONG)
    (told,) = (each.getMessage() for each in caplog.records if "waves" in each.message)
    assert "step 1: this rank's copy of the state takes 4.6 MiB, and memory holds 2.5 MiB" in told
    assert "in 2 waves, and training waited" in told
    assert "in spite of staging='overlapped'. staging_memory='5 MiB' avoids" in told


def test_memory_for_less_than_a_few_pieces_is_refused_with_what_to_give(tmp_path):
    with CheckpointManager(tmp_path, staging_memory="1 MiB", on_error="warn") as manager:
        error = manager.save(1, twice()).committed.exception(LONG)
    assert isinstance(error, SaveError)
    assert "only 1.0 MiB" in str(error)
    assert "In parts it can be saved with 2 MiB at least" in str(error)


@pytest.mark.parametrize("nth", [0, 11, 20])
@pytest.mark.parametrize("key", ["*.distcp", "*.replica"])
def test_a_write_that_fails_in_any_wave_fails_the_save_and_the_next_succeeds(tmp_path, nth, key):
    full = Fault(method="write", key=f"*step-000000002*{key}", nth=nth, error=OSError(28, "full"))
    storage = FaultyStorage(LocalStorage(tmp_path), [full])
    options = {"replicas": 2} if "replica" in key else {}
    with CheckpointManager(storage, staging_memory=MEMORY, on_error="warn", **options) as manager:
        manager.save(1, {"w": torch.ones(3)})
        with pytest.raises(SaveError, match="full"):
            manager.save(2, twice()).result(LONG)
        assert steps(manager) == [1]
        manager.save(3, twice()).result(LONG)
        assert manager.verify(3) == []


def test_a_copy_that_fails_midway_fails_the_save_and_training_goes_on(tmp_path, monkeypatch):
    copied = []

    def broken(targets, sources, **_):
        copied.append(len(targets))
        if len(copied) == 15:
            raise RuntimeError("the device is lost")
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    monkeypatch.setattr(_stager, "copy_all", broken)
    with CheckpointManager(tmp_path, staging_memory=MEMORY, on_error="warn") as manager:
        handle = manager.save(1, twice())
        with pytest.raises(SaveError, match=r"while staging: .*the device is lost"):
            handle.result(LONG)
        assert handle.staged.exception(LONG) is not None
        manager.save(2, twice()).result(LONG)
        assert manager.verify(2) == []


def test_an_interruption_of_the_copies_is_raised_once_and_fails_that_save_alone(tmp_path, monkeypatch):
    copied = []

    def interrupted(targets, sources, **_):
        copied.append(len(targets))
        if len(copied) == 15:
            raise KeyboardInterrupt
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    monkeypatch.setattr(_stager, "copy_all", interrupted)
    with CheckpointManager(tmp_path, staging_memory=MEMORY, on_error="warn") as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.save(1, twice())
        manager.wait()
        manager.save(2, twice()).result(LONG)
        assert steps(manager) == [2]
        assert manager.verify(2) == []


def test_storage_that_hangs_ends_the_wait_of_the_training_at_the_deadline(tmp_path):
    opened = threading.Event()
    hang = Fault(method="write", key="*1*.distcp", nth=12, before=lambda _: opened.wait(LONG))
    storage = FaultyStorage(LocalStorage(tmp_path), [hang])
    with CheckpointManager(storage, staging_memory=MEMORY, on_error="warn", deadline_seconds=0.5) as manager:
        handle = manager.save(1, twice())
        assert isinstance(handle.committed.exception(LONG), SaveError)
        opened.set()
        assert steps(manager) == []


def test_what_is_not_finite_is_found_in_every_wave(tmp_path):
    state = {**twice(), "float8": torch.zeros(30_000).to(torch.float8_e5m2)}
    state = {name: torch.zeros_like(each) for name, each in state.items()}
    with CheckpointManager(
        tmp_path, staging_memory=MEMORY, reject_non_finite=True, on_error="warn"
    ) as manager:
        manager.save(1, state).result(LONG)
        for step, (name, each) in enumerate(state.items(), start=2):
            each[-1] = math.inf
            with pytest.raises(SaveError, match=f"NaN or infinity in {name}, and"):
                manager.save(step, state).result(LONG)
            each[-1] = 0
        assert steps(manager) == [1]


def test_a_range_of_a_tensor_is_its_elements_in_order_whatever_its_layout():
    base = torch.arange(120)
    for tensor in (base, base.view(4, 5, 6).permute(2, 0, 1), base.view(24, 5)[::3], base.view(2, 60).T):
        flat = tensor.flatten()
        for start in range(0, len(flat), 7):
            for stop in range(start + 1, len(flat) + 1, 5):
                parts = flat_parts(tensor, start, stop)
                assert torch.equal(torch.cat([part.flatten() for part in parts]), flat[start:stop])


@pytest.mark.emulator
def test_parts_on_their_way_to_a_bucket_keep_their_memory(s3_endpoint):
    boto3 = pytest.importorskip("boto3")
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="waves")
    options = {"key": "testing", "secret": "testing", "endpoint_url": s3_endpoint}
    storage = object_storage("s3://waves/run", write_block_bytes=5 * MIB, **options)
    assert storage.held_bytes(6000 * 5 * MIB) == 20 * MIB
    with CheckpointManager(storage, staging_memory="8 MiB") as manager:
        manager.save(1, tensors(30 * MIB, 3 * MIB)).result(LONG)
        assert manager.verify(1) == []


def job(root: str) -> list[object]:
    """Rank 1 needs waves, rank 0 goes on; what they learn of a difference, a fault, and a good save."""
    _image.PIECE_BYTES = 256 * KIB
    rank = dist.get_rank()
    full = Fault(method="write", key="*step-000000002~/__1_*", nth=13, error=OSError(28, "full"))
    storage = FaultyStorage(LocalStorage(root), [full])
    state = tensors(12 * MIB, MIB + 4 * KIB)
    found: list[object] = []
    memory = MEMORY if rank else None
    with CheckpointManager(storage, staging_memory=memory, on_error="warn", replicas=2) as manager:
        for step in (1, 2, 3):
            state["w5"][7] = rank if step == 1 else 0
            handle = manager.save(step, state)
            assert handle is not None
            dist.all_reduce(torch.zeros(1))  # as the next step would
            found.append(type(handle.committed.exception(LONG)).__name__)
            manager.wait()
        found += [steps(manager), manager.verify(3), manager.staging_bytes <= 2560 * KIB]
    return found


@pytest.mark.distributed
def test_ranks_that_need_waves_and_ranks_that_do_not_save_together(tmp_path):
    zero, one = run_ranks(job, 2, str(tmp_path))
    expected = ["DivergenceError", "SaveError", "NoneType", [3], []]
    assert zero == [*expected, False]
    assert one == [*expected, True]


def killed(root: str, nth: int) -> None:
    _image.PIECE_BYTES = 256 * KIB
    death = Fault(method="write", key="*step-000000002~/*.distcp", nth=nth, before=kill_process)
    with CheckpointManager(FaultyStorage(LocalStorage(root), [death]), staging_memory=MEMORY) as manager:
        manager.save(1, twice())
        manager.save(2, twice())


@pytest.mark.distributed
@pytest.mark.parametrize("nth", [3, 19])
def test_a_kill_in_any_wave_leaves_the_old_checkpoint_alone(tmp_path, nth):
    run_ranks(killed, 1, str(tmp_path), nth, expect_death={0})
    with CheckpointManager(tmp_path) as manager:
        assert steps(manager) == [1]
        assert manager.verify(1) == []
