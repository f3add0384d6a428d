"""The benchmarks of loads measure what they say, verify what was loaded, and report everyone."""

from __future__ import annotations

import json
import mmap
import platform
from pathlib import Path

import pytest
import torch

from benchmarks import load
from benchmarks.comparison import Row
from benchmarks.contenders import NotRunError
from benchmarks.lineup import opened
from benchmarks.loading import lineup
from benchmarks.loading.comparison import as_stated, per_byte, verification_cost
from benchmarks.loading.limits import MemcpyChecksumTwoThreads, MemcpyOneThread, RawBuffered, RawDirect
from benchmarks.loading.loader import Loader, LoadTask, WrongValuesError
from benchmarks.loading.ours import OursFull, OursOff, OursRead, options
from benchmarks.loading.pages import Traffic, drop, warm
from benchmarks.loading.peak import Memory
from benchmarks.loading.rounds import make_load_task, prepare_all
from benchmarks.loading.stock import StockLoad, TorchLoad
from benchmarks.loading.timing import LoadTiming, of_all_ranks, one_load, time_load
from benchmarks.machine import machine_facts
from benchmarks.pieces import each_piece
from benchmarks.rounds import take_turns
from benchmarks.state import StateShape
from benchmarks.timing import Spread
from tests.kit.ranks import run_ranks

CPU = torch.device("cpu")
SMALL = ["--gib", "0.002", "--tensors", "5", "--rounds", "2"]
QUICK = "ours-full,ours-off,ours-on-dcp,dcp-load,torch-load,raw,raw-direct,memcpy,crc,memcpy-crc-2"
WITHOUT_FILES = {"memcpy", "crc", "memcpy-crc-2"}
MIB = 1 << 20


@pytest.fixture
def task(tmp_path) -> LoadTask:
    return make_load_task(StateShape(gib=0.002, tensors=5, even=False), CPU, tmp_path)


@pytest.fixture
def bench(tmp_path):
    """Run the command line and return the JSON it wrote."""

    def run(*arguments: str) -> dict:
        out = tmp_path / "out.json"
        assert load.main([*arguments, "--root", str(tmp_path), "--json", str(out)]) == 0
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("bench-")] == []
        return json.loads(out.read_text())

    return run


@pytest.fixture
def counted_disk(tmp_path) -> Path:
    """A directory on a disk whose reads the kernel counts."""
    if Traffic.now() is None or machine_facts(tmp_path, CPU)["filesystem"] in {"tmpfs", "ramfs"}:
        pytest.skip("reads from a device are not counted here")
    return tmp_path


def timing(seconds: float, device: int | None = 0) -> LoadTiming:
    return LoadTiming(seconds=seconds, asked_bytes=device, device_bytes=device)


class Forgetful(Loader):
    key, name, kind, format = "forgetful", "leaves all tensors but the first out", "other", ""

    def load(self) -> None:
        for name, tensor in list(self.task.tensors.items())[:1]:
            tensor.copy_(self._saved[name])

    def prepare(self) -> None:
        self._saved = {name: tensor.clone() for name, tensor in self.task.tensors.items()}


def bytes_asked_while_passing_on(size_bytes: int) -> int:
    tensor = torch.ones(size_bytes, dtype=torch.uint8)
    before = Traffic.now()
    torch.distributed.broadcast(tensor, 0)
    after = Traffic.now()
    return 0 if before is None or after is None else after.asked - before.asked


class Unprepared(Forgetful):
    key, name = "unprepared", "cannot write its files"

    def prepare(self) -> None:
        raise OSError("disk full")


def test_the_comparison_reports_medians_ratios_bytes_and_conditions(bench, capsys):
    report = bench(*SMALL, "--only", QUICK)
    assert report["benchmark"] == "load"
    assert report["schema_version"] == 1
    assert any(line.startswith("Warm") for line in report["conditions"])
    results = report["results"]
    assert results["pages"] == "warm"
    contenders = results["contenders"]
    assert list(contenders) == QUICK.split(",")
    for key, each in contenders.items():
        assert each["not_run"] is None, (key, each["not_run"])
        assert each["seconds"]["min"] <= each["seconds"]["median"] <= each["seconds"]["max"]
        assert {len(values) for values in each["samples"].values()} == {2}
        assert (each["as_stated"] is None) or key not in WITHOUT_FILES
    for key in ("ours-full", "ours-off", "dcp-load", "raw"):
        assert contenders[key]["asked_per_byte"] is None or contenders[key]["asked_per_byte"]["median"] >= 1
    medians = {key: each["seconds"]["median"] for key, each in contenders.items()}
    assert results["ratios"]["ours-full"]["dcp-load"]["seconds"] == pytest.approx(
        medians["dcp-load"] / medians["ours-full"]
    )
    assert results["verification_cost"]["ours-full"] == pytest.approx(
        medians["ours-full"] / medians["ours-off"] - 1
    )
    shown = capsys.readouterr().out
    assert "times as long as" in shown
    assert "limit: memcpy + CRC-32, 2 threads" in shown
    assert "verification costs" in shown


def test_a_cold_comparison_says_so_and_counts_what_the_device_delivers(bench, counted_disk):
    report = bench(*SMALL, "--cold", "--only", "ours-full,dcp-load,torch-load,raw-direct")
    assert any("posix_fadvise(DONTNEED)" in line for line in report["conditions"])
    assert report["results"]["pages"] == "cold"
    for key, each in report["results"]["contenders"].items():
        assert each["device_per_byte"]["min"] >= 0.95, key
        assert each["as_stated"] is True


def test_files_hold_no_host_names_and_no_paths(bench, tmp_path):
    text = json.dumps(bench(*SMALL, "--only", "ours-off,dcp-load"))
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    assert platform.node() not in text


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    arguments = [*SMALL, "--only", "ours-off,dcp-load,memcpy", "--picture", str(picture)]
    assert load.main([*arguments, "--root", str(tmp_path)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_load_that_leaves_a_tensor_out_is_found_and_reported(task):
    with opened([Forgetful, Unprepared, OursOff], task) as running:
        prepare_all(running)
        timings = take_turns(
            running, lambda loader, _: one_load(loader, "warm"), rounds=2, warm_up=0, progress=lambda _: None
        )
    assert set(running.not_run) == {"forgetful", "unprepared"}
    assert "4 of 5 tensors" in running.not_run["forgetful"]
    assert "layer1.weight" in running.not_run["forgetful"]
    assert "disk full" in running.not_run["unprepared"]
    assert {key: len(each) for key, each in timings.items()} == {"ours-off": 2}


def test_nothing_is_left_of_a_tensor_that_was_poisoned(task):
    task.check()
    task.poison()
    with pytest.raises(WrongValuesError, match="5 of 5"):
        task.check()


@pytest.mark.parametrize("limit", [RawBuffered, RawDirect, MemcpyOneThread, MemcpyChecksumTwoThreads])
def test_the_limits_move_every_byte_of_the_state(task, limit):
    loader = limit(task)
    loader.prepare()
    loader.poison()
    with pytest.raises(WrongValuesError):
        loader.check()
    loader.load()
    loader.check()
    expected = b"".join(bytes(each.view(torch.uint8).numpy()) for each in task.tensors.values())
    assert task.shared["target"][: task.size_bytes] == expected


def test_a_limit_that_reads_too_little_is_an_error(task):
    loader = RawBuffered(task)
    loader.prepare()
    with open(loader.files()[0], "r+b") as file:
        file.truncate(task.size_bytes // 2)
    with pytest.raises(OSError, match="less than"):
        loader.load()


def test_formats_are_written_once_and_loaders_of_one_format_share_them(task):
    for each in (OursFull, OursOff, StockLoad):
        loader = each(task)
        loader.prepare()
        loader.close()
    assert sorted(path.name for path in task.root.iterdir()) == ["dcp", "ours"]
    assert [path.name for path in (task.root / "ours").glob("step-*")] == ["step-000000000"]


def test_dropped_files_come_from_the_device_and_warm_ones_do_not(counted_disk):
    path = counted_disk / "file"
    path.write_bytes(b"\xa5" * (4 * MIB))

    def delivered() -> int:
        before = Traffic.now()
        path.read_bytes()
        after = Traffic.now()
        assert before is not None
        assert after is not None
        assert after.asked - before.asked >= 4 * MIB
        return after.device - before.device

    drop([path])
    assert delivered() >= 4 * MIB
    drop([path])
    warm([path])
    assert delivered() == 0


def test_bytes_of_a_timed_load_are_its_own(task):
    loader = StockLoad(task)
    loader.prepare()
    timed = time_load(loader)
    if timed.asked_bytes is not None:
        assert timed.asked_bytes >= task.size_bytes
    loader = TorchLoad(task)
    loader.prepare()
    timed = time_load(loader)
    if timed.asked_bytes is not None:
        assert timed.asked_bytes < task.size_bytes, "it maps the file"


def test_a_load_is_cold_or_warm_only_if_every_round_was():
    def row(*device: int | None) -> Row[Loader]:
        return Row(contender=StockLoad, timings=[timing(1.0, each) for each in device])

    assert as_stated(row(100, 96), 100, "cold") is True
    assert as_stated(row(100, 94), 100, "cold") is False
    assert as_stated(row(0, 4), 100, "warm") is True
    assert as_stated(row(0, 60), 100, "warm") is False
    assert as_stated(row(None), 100, "cold") is None
    assert as_stated(Row(contender=MemcpyOneThread, timings=[timing(1.0)]), 100, "cold") is None
    direct = Row(contender=RawDirect, timings=[timing(1.0, 100)])
    assert as_stated(direct, 100, "warm") is None
    assert as_stated(direct, 100, "cold") is True
    assert per_byte(row(50, 150), "device_bytes", 100) == Spread(median=1.0, low=0.5, high=1.5)


def test_the_cost_of_verification_is_over_the_unverified_load():
    rows = [
        Row(contender=OursFull, timings=[timing(1.1)]),
        Row(contender=OursRead, timings=[], not_run="no such option"),
        Row(contender=OursOff, timings=[timing(1.0)]),
        Row(contender=StockLoad, timings=[timing(5.0)]),
    ]
    assert verification_cost(rows) == {"ours-full": pytest.approx(0.1)}
    assert verification_cost(rows[:2]) == {}


def test_of_several_ranks_the_slowest_counts_and_all_their_bytes():
    assert of_all_ranks([timing(1.0, 10), timing(3.0, 5)]) == timing(3.0, 15)
    assert of_all_ranks([timing(1.0, 10), timing(3.0, None)]) == timing(3.0, None)


def test_an_option_that_this_version_does_not_have_is_a_reason_not_to_run():
    assert options(verify="full").verify in {True, "full"}
    assert options(verify="off").verify in {False, "off"}
    with pytest.raises(NotRunError, match="sometimes"):
        options(verify="sometimes")


def test_pieces_cover_everything_once_whoever_does_them():
    seen = bytearray(1000)

    def work(piece: slice) -> None:
        for index in range(piece.start, piece.stop):
            seen[index] += 1

    each_piece(len(seen), work, threads=3, piece_bytes=64)
    assert set(seen) == {1}


def test_an_error_in_any_thread_is_an_error_of_the_whole():
    def work(piece: slice) -> None:
        if piece.start == 64:
            raise OSError("bad sector")

    with pytest.raises(OSError, match="bad sector"):
        each_piece(1000, work, threads=2, piece_bytes=64)


def test_the_memory_of_a_process_is_what_it_touches():
    # Not from the heap, where earlier tests may have left touched pages that are free.
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        before = Memory.now()
        held[:] = b"\xa5" * len(held)
        after = Memory.now()
    assert after.anonymous - before.anonymous >= 30 * MIB
    assert after.highest >= after.resident


@pytest.mark.parametrize(
    "wrong",
    [
        ["--only", "nobody"],
        ["--ranks", "2", "--peak"],
        ["--ranks", "3", "--layout", "hsdp"],
        ["--ranks", "2", "--only", "memcpy"],
        ["--peak", "--only", "raw"],
        ["--layout", "diagonal"],
    ],
)
def test_a_wrong_command_line_is_refused(wrong):
    with pytest.raises(SystemExit, match="2"):
        load.main(wrong)


def test_every_loader_has_a_key_and_a_name_of_its_own():
    everyone = list(lineup.ALL.values())
    assert len({each.key for each in everyone}) == len({each.name for each in everyone}) == len(everyone)
    assert set(lineup.LOAD) | set(lineup.RANKS) | set(lineup.PEAK) <= set(everyone)


@pytest.mark.slow
def test_all_loaders_run_or_say_why_not(bench):
    contenders = bench(*SMALL)["results"]["contenders"]
    assert list(contenders) == [each.key for each in lineup.LOAD]
    for key, each in contenders.items():
        if each["not_run"] is None:
            assert len(each["samples"]["seconds"]) == 2
        else:
            assert key in {"ours-read", "torch-checkpointing", "safetensors", "safetensors-open"}
            assert "not installed" in each["not_run"] or "this version" in each["not_run"]


@pytest.mark.slow
def test_the_peak_is_measured_in_fresh_processes(bench):
    report = bench("--peak", "--gib", "0.125", "--large", "--rounds", "1", "--only", "ours-off,torch-load")
    contenders = report["results"]["contenders"]
    for each in contenders.values():
        assert each["not_run"] is None
        assert len(each["samples"]["peak_mib"]) == 1
    # It maps the whole file, and nothing of that is anonymous.
    assert contenders["torch-load"]["peak_mib"]["median"] >= 120
    assert contenders["torch-load"]["anonymous_mib"]["median"] < 100


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "hsdp", "fsdp", "reshard"])
def test_ranks_load_together_and_every_read_is_counted(bench, layout):
    report = bench("--ranks", "2", "--layout", layout, *SMALL, "--timeout-s", "200")
    assert report["benchmark"] == "load-ranks"
    contenders = report["results"]["contenders"]
    assert list(contenders) == [each.key for each in lineup.RANKS]
    for each in contenders.values():
        assert each["not_run"] is None
        assert len(each["samples"]["seconds"]) == 2
        assert each["asked_per_byte"] is None or each["asked_per_byte"]["median"] >= 1
    stock = contenders["dcp-load"]["asked_per_byte"]
    if stock is not None and layout != "fsdp":
        assert stock["median"] >= 1.9, "both ranks read every chunk"


@pytest.mark.slow
@pytest.mark.distributed
def test_what_ranks_pass_on_to_one_another_is_no_read():
    assert max(run_ranks(bytes_asked_while_passing_on, 2, 8 * MIB)) < MIB
