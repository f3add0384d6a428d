"""The benchmarks measure what they say, report everyone, and write nothing private into their files."""

from __future__ import annotations

import json
import platform
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks import accelerate, lineup, records, save, tiny, trainable
from benchmarks.comparison import Row, ratios
from benchmarks.contenders import Contender, InFlight, NotRunError, Task, ended
from benchmarks.interference import disturbance
from benchmarks.limits import Memcpy, RawDirect
from benchmarks.others import fsync_tree, in_background
from benchmarks.ours import PREWARMED, OursBlocking, OursOverlapped
from benchmarks.planning import Workload
from benchmarks.ranks import slowest
from benchmarks.report import render
from benchmarks.rounds import make_task, measure
from benchmarks.soak import trend
from benchmarks.state import GIB, StateShape, tensor_sizes
from benchmarks.stock import StockAsyncDefault, StockSaveOneThread
from benchmarks.stock_planning import StockCachedPlanning, StockPlanning, local_plan
from benchmarks.timing import Spread, Timing, end_of, time_save
from benchmarks.training import Training, one_thread

CPU = torch.device("cpu")
SMALL = ["--gib", "0.002", "--tensors", "5", "--rounds", "2"]
QUICK = "ours-overlapped,ours-blocking,dcp-save,dcp-async,torch-save,memcpy,o-direct"


@pytest.fixture
def task(tmp_path) -> Task:
    return make_task(StateShape(gib=0.002, tensors=5, even=False), CPU, tmp_path)


@pytest.fixture
def bench(tmp_path):
    """Run the command line and return the JSON it wrote."""

    def run(*arguments: str) -> dict:
        out = tmp_path / "out.json"
        assert save.main([*arguments, "--root", str(tmp_path), "--json", str(out)]) == 0
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("bench-")] == []
        return json.loads(out.read_text())

    return run


def timing(stall: float | None, durable: float | None = None) -> Timing:
    return Timing(stall_s=stall, staged_s=None, durable_s=durable)


class Failing(Contender):
    key, name, kind = "failing", "fails in its second save", "other"

    def start(self, number: int) -> InFlight:
        if number:
            raise CheckpointException("write", {})
        return InFlight(durable=ended())


class NotInstalled(Contender):
    key, name, kind = "not-installed", "is not installed", "other"

    def __init__(self, task: Task) -> None:
        raise NotRunError("not installed: pip install it")

    def start(self, number: int) -> InFlight:
        raise AssertionError("it has no instance")


class Huge(Failing):
    key, copies = "huge", 10**9


def test_the_comparison_reports_medians_ratios_and_conditions(bench, capsys):
    report = bench(*SMALL, "--only", QUICK)
    assert report["benchmark"] == "save"
    assert report["schema_version"] == 1
    assert {"cpus", "filesystem", "kernel", "torch", "device"} <= report["machine"].keys()
    assert any("fsync" in line for line in report["conditions"])
    assert any("page cache" in line for line in report["conditions"])
    contenders = report["results"]["contenders"]
    assert list(contenders) == QUICK.split(",")
    for each in contenders.values():
        assert each["not_run"] is None
        assert each["stall_s"] is None or each["stall_s"]["min"] <= each["stall_s"]["median"]
        assert len(each["samples"]["durable_s"]) == 2
    assert contenders["memcpy"]["durable_s"] is None
    assert contenders["memcpy"]["copy_gb_per_s"] > 0
    assert contenders["o-direct"]["stall_s"] is None
    ratio = report["results"]["ratios"]["ours-blocking"]["dcp-save"]["stall_s"]
    medians = [contenders[key]["stall_s"]["median"] for key in ("dcp-save", "ours-blocking")]
    assert ratio == pytest.approx(medians[0] / medians[1])
    shown = capsys.readouterr().out
    assert "limit: memcpy" in shown
    assert "fsync" in shown


def test_files_hold_no_host_names_and_no_paths(bench, tmp_path):
    text = json.dumps(bench(*SMALL, "--only", "ours-overlapped"))
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    assert platform.node() not in text


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    arguments = [*SMALL, "--only", "ours-overlapped,memcpy,o-direct", "--picture", str(picture)]
    assert save.main([*arguments, "--root", str(tmp_path)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_whoever_cannot_run_is_reported_with_the_reason(task):
    with lineup.opened([Failing, NotInstalled, Huge, OursBlocking], task) as opened:
        timings = measure(opened, rounds=2, warm_up=0, progress=lambda _: None)
    assert set(opened.not_run) == {"failing", "not-installed", "huge"}
    assert "CheckpointException" in opened.not_run["failing"]
    assert "pip install" in opened.not_run["not-installed"]
    assert "--only" in opened.not_run["huge"]
    assert {key: len(each) for key, each in timings.items()} == {"failing": 1, "ours-blocking": 2}


def test_where_memory_is_short_ours_and_the_floors_come_first():
    assert lineup.affordable(lineup.SAVE, 100) == sorted(
        lineup.SAVE, key=lambda each: ("ours", "limit", "stock", "other").index(each.kind)
    )
    few = lineup.affordable(lineup.SAVE, 4)
    assert {each.key for each in few} >= {
        "ours-overlapped",
        "ours-blocking",
        "memcpy",
        "o-direct",
        "dcp-save",
    }
    assert {each.key for each in few}.isdisjoint({"dcp-async", "dcp-async-reused", "torchsnapshot"})
    assert lineup.affordable([OursOverlapped], 1) == [OursOverlapped]


def test_every_save_is_deleted_after_its_turn(task):
    types = [OursOverlapped, StockSaveOneThread, StockAsyncDefault, RawDirect]
    with lineup.opened(types, task) as opened:
        measure(opened, rounds=1, warm_up=0, progress=lambda _: None)
        assert opened.not_run == {}
        assert [path for path in task.root.rglob("*") if path.suffix == ".distcp" or path.name == "raw"] == []


def test_an_error_behind_the_call_is_an_error_of_the_save(task):
    class Late(Failing):
        def start(self, number: int) -> InFlight:
            future: Future[None] = Future()
            future.set_exception(OSError("disk full"))
            return InFlight(durable=future)

    with pytest.raises(OSError, match="disk full"):
        time_save(Late(task), 0)


def test_the_floors_move_as_many_bytes_as_the_state_has(task):
    raw, memcpy = RawDirect(task), Memcpy(task)
    raw.start(0).durable.result()
    written = (raw.directory(0) / "raw").read_bytes()
    expected = b"".join(bytes(each.view(torch.uint8).numpy()) for each in task.tensors.values())
    assert written[: task.size_bytes] == expected
    assert len(written) - task.size_bytes < 4096
    memcpy.start(0).durable.result()
    assert all(torch.equal(memcpy._buffers[name], tensor) for name, tensor in task.tensors.items())


def test_sizes_add_up_and_no_tensor_has_an_odd_number_of_elements():
    for shape in (
        StateShape(gib=2, tensors=330, even=False),
        StateShape(gib=0.3, tensors=20_000, even=True),
        StateShape(gib=2, tensors=16, even=True),
    ):
        sizes = tensor_sizes(shape)
        assert len(sizes) == shape.tensors
        assert sum(n * dtype.itemsize for n, dtype in sizes.values()) == pytest.approx(
            shape.gib * GIB, rel=0.03
        )
        assert all(n % 64 == 0 for n, _ in sizes.values())


@pytest.mark.slow
def test_the_steps_of_the_training_wait_for_our_copies(tmp_path):
    with one_thread():
        training = Training(CPU, step_seconds=0.001)
    task = Task(tensors={"w": torch.ones(1024)}, root=tmp_path, optimizers=[training.optimizer])
    with lineup.opened([OursOverlapped], task) as opened:
        flight = opened.running[0].start(0)
        assert len(training.optimizer._optimizer_step_pre_hooks) == 1
        training.step(opened.running[0].step_guard())
        assert flight.staged is not None
        flight.staged.result()
        flight.durable.result()


def test_lost_time_counts_the_stall_and_every_slow_step():
    seen = disturbance([0.5, 0.3, 0.2], stall=0.4, durable=1.3, median_step=0.2, beside=True)
    assert seen.lost_s == pytest.approx(0.4 + 0.3 + 0.1)
    assert seen.worst_step == pytest.approx(0.9 / 0.2)
    assert seen.speed_kept == pytest.approx(0.2 / (1.0 / 3))
    blocking = disturbance([0.2], stall=3.0, durable=3.0, median_step=0.2, beside=False)
    assert blocking.lost_s == pytest.approx(3.0)
    assert blocking.speed_kept is None


def test_the_end_of_a_save_is_its_own_and_not_that_of_waiting_for_it():
    future: Future[None] = Future()
    seen = end_of(future)
    assert not seen.done()
    before = time.perf_counter()
    future.set_exception(OSError("disk full"))
    assert before <= seen.result() <= time.perf_counter()


def test_the_slowest_rank_counts():
    ranks = [timing(0.1, 2.0), timing(0.3, 1.0)]
    assert slowest(ranks) == timing(0.3, 2.0)


def test_ratios_are_others_over_ours():
    rows = [
        Row(contender=OursBlocking, timings=[timing(0.5, 1.0)]),
        Row(contender=StockSaveOneThread, timings=[timing(2.0, 2.0), timing(4.0, 4.0), timing(9.0, 9.0)]),
        Row(contender=Memcpy, timings=[timing(0.25)]),
        Row(contender=RawDirect, timings=[], not_run="refused"),
    ]
    assert ratios(rows) == {
        "ours-blocking": {
            "dcp-save": {"stall_s": 8.0, "durable_s": 4.0},
            "memcpy": {"stall_s": 0.5, "durable_s": None},
        }
    }


def test_a_spread_knows_only_what_was_measured():
    assert Spread.of([None, None]) is None
    assert Spread.of([3.0, None, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0)


def test_a_trend_shows_growth_and_forgives_the_first_saves():
    assert trend([100.0] + [10.0] * 50).per_thousand == pytest.approx(0)
    growing = trend([float(number) for number in range(100)])
    assert growing.per_thousand == pytest.approx(1000)
    assert growing.last - growing.first == pytest.approx(90)


def test_tables_keep_remarks_out_of_the_columns_widths():
    lines = render(("", "a"), [["x", "1"], ["y", "not run: " + "z" * 50, "more"]])
    assert lines[1] == "x  1"


def test_the_page_of_measurements_is_that_of_its_records():
    """`python -m benchmarks.records` writes it."""
    assert records.PAGE.read_text(encoding="utf-8") == records.page()
    pictures = {path.name for path in records.PAGE.parent.glob("*.png")}
    assert {name for name in pictures if f"]({name})" in records.page()} == pictures


def test_a_record_takes_new_figures_and_keeps_what_people_have_written(tmp_path, monkeypatch):
    written = {"section": "Loads", "title": "Ours", "compares": "What?", "note": "Why", "tables": ["old"]}
    record = tmp_path / "record.json"
    record.write_text(json.dumps(written))
    arguments = [*SMALL, "--only", "memcpy", "--root", str(tmp_path), f"--record={record}"]
    monkeypatch.setattr("sys.argv", ["save.py", *arguments])
    assert save.main(arguments) == 0
    found = json.loads(record.read_text())
    assert {name: found[name] for name in ("section", "title", "compares", "note")} == {
        name: written[name] for name in ("section", "title", "compares", "note")
    }
    assert found["command"] == f"python -m benchmarks.save {' '.join(SMALL)} --only memcpy"
    assert [row[0] for row in found["tables"][0]["rows"]] == [Memcpy.name]
    assert str(tmp_path) not in record.read_text()
    assert any("page cache" in each for each in found["conditions"])


def test_fsync_reaches_every_file_and_fails_loudly(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"1")
    fsync_tree(tmp_path)
    (tmp_path / "a" / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        in_background(lambda: fsync_tree(tmp_path)).result()


@pytest.mark.slow
def test_a_soak_samples_every_save(bench):
    report = bench("--soak", "4", "--gib", "0.002", "--tensors", "5")
    assert report["results"]["saves"] == 4
    assert {len(values) for values in report["results"]["samples"].values()} == {4}
    assert report["results"]["staging_bytes"] < 10 * report["results"]["size_bytes"]
    assert report["results"]["trends"].keys() == report["results"]["samples"].keys()


@pytest.mark.slow
def test_interference_measures_steps_beside_saves(bench):
    report = bench(
        "--interference", *SMALL[:4], "--rounds", "1", "--step-ms", "2", "--base-steps", "3",
        "--only", "ours-overlapped,dcp-async,memcpy,o-direct-1,o-direct-crc",
    )  # fmt: skip
    for each in report["results"]["contenders"].values():
        assert each["not_run"] is None
        assert each["steps"]["min"] >= 1
        assert each["worst_step"]["min"] > 0


@pytest.mark.slow
def test_simulated_messages_are_those_of_the_planner(bench):
    report = bench("--simulate-ranks", "2,6", "--tensors", "10")
    found = report["results"]["outcomes"]
    outcomes = {(each["key"], each["world_size"]): each for each in found}
    assert (len(outcomes), len({each["layout"] for each in found})) == (6, 5)
    ours = outcomes["ours", 6]
    assert ours["later"]["gathered_bytes"] < 6 * 1024
    assert ours["later"]["scattered_bytes"] == 0
    assert ours["later"]["broadcast_bytes"] < 1024
    stock, cached = outcomes["dcp", 6], outcomes["dcp-cached", 6]
    assert stock["later"] == stock["first"]
    assert cached["first"]["gathered_bytes"] == stock["first"]["gathered_bytes"]
    assert cached["later"]["gathered_bytes"] < cached["first"]["gathered_bytes"] / 2
    assert cached["later"]["scattered_bytes"] < cached["first"]["scattered_bytes"] / 10
    # Plan caching spares neither the results nor the metadata.
    assert cached["later"]["broadcast_bytes"] >= stock["first"]["broadcast_bytes"]


def test_a_simulated_save_is_a_checkpoint_that_dcp_can_list(tmp_path):
    workload = Workload(world_size=3, tensors=4)
    planning = StockPlanning(workload, tmp_path)
    planning.save()
    metadata = torch.distributed.checkpoint.FileSystemReader(tmp_path / "dcp-1").read_metadata()
    assert len(metadata.state_dict_metadata) == 4
    # A parameter and two averages are sharded, the step is on all ranks.
    assert [len(entry.chunks) for entry in metadata.state_dict_metadata.values()] == [3, 3, 3, 1]
    assert len(metadata.storage_data) == 10
    assert len(local_plan(workload, 2).items) == 4


def test_simulations_leave_no_plans_in_dcps_caches(tmp_path):
    from torch.distributed.checkpoint import SavePlanner

    planning = StockCachedPlanning(Workload(world_size=2, tensors=3), tmp_path)
    planning.save()
    assert SavePlanner._cached_all_plans
    planning.close()
    assert not SavePlanner._cached_all_plans
    assert not SavePlanner._cached_global_plan


def test_a_simulation_that_would_not_fit_is_not_begun(bench, capsys):
    report = bench("--simulate-ranks", "4", "--tensors", "1000000000")
    assert {each["first"] for each in report["results"]["outcomes"]} == {None}
    assert "GiB of memory" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--only", "nobody"], ["--gib", "0"], ["--soak", "2", "--first"]])
def test_a_wrong_command_line_is_refused(wrong):
    with pytest.raises(SystemExit, match="2"):
        save.main(wrong)


@pytest.mark.slow
def test_the_first_save_is_measured_in_fresh_processes_and_ours_after_a_prewarm_too(bench):
    results = bench("--first", *SMALL[:4], "--rounds", "1", "--only", "ours-overlapped")["results"]
    contenders = results["contenders"]
    assert list(contenders) == ["ours-overlapped", "ours-overlapped-prewarmed"]
    for each in contenders.values():
        assert each["not_run"] is None
        assert len(each["samples"]["stall_s"]) == 1
    assert results["prewarm_s"]["ours-overlapped-prewarmed"]["median"] > 0


def test_what_tiny_tensors_cost_is_measured_of_us_and_of_stock(tmp_path):
    files: dict[bool, float] = {}
    for stock in (False, True):
        order = {"stock": stock, "tensors": 50, "root": str(tmp_path / "run")}
        tiny.main(order, tmp_path / "outcome.json")
        found = json.loads((tmp_path / "outcome.json").read_text())
        files[stock] = found.pop("files")
        assert found.keys() == {"first", "later", "load", "memory"}
        assert min(found["first"], found["later"], found["load"]) > 0
        assert not (tmp_path / "run").exists()
    assert 1 < files[False] < files[True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "types"), [("--checksums", lineup.CHECKSUMS), ("--replicas", lineup.REPLICAS)]
)
def test_both_kinds_of_checksums_and_one_and_two_files_are_measured_in_the_same_rounds(bench, mode, types):
    contenders = bench(mode, *SMALL)["results"]["contenders"]
    assert list(contenders) == [each.key for each in types]
    assert all(len(each["samples"]["durable_s"]) == 2 for each in contenders.values())


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_save_together(bench):
    report = bench("--ranks", "2", *SMALL, "--timeout-s", "200")
    contenders = report["results"]["contenders"]
    assert list(contenders) == [each.key for each in lineup.RANKS]
    for each in contenders.values():
        assert each["not_run"] is None
        assert len(each["samples"]["durable_s"]) == 2


@pytest.mark.slow
def test_all_contenders_run_or_say_why_not(bench):
    contenders = bench(*SMALL)["results"]["contenders"]
    assert list(contenders) == [each.key for each in lineup.SAVE]
    optional = {"torchsnapshot", "torch-checkpointing"}
    for key, each in contenders.items():
        if each["not_run"] is None:
            assert each["samples"]["durable_s"]
        else:
            assert key in optional
            assert "not installed" in each["not_run"]


def test_every_contender_has_a_key_and_a_name_of_its_own():
    everyone = [*lineup.INTERFERENCE, *PREWARMED]
    assert len({each.key for each in everyone}) == len({each.name for each in everyone}) == len(everyone)
    assert set(lineup.SAVE) | set(lineup.RANKS) <= set(lineup.ALL.values())


def test_the_stall_of_save_state_is_measured_beside_the_cores(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    out = tmp_path / "out.json"
    arguments = ["--mib", "1", "--rounds", "1", "--root", str(tmp_path), "--json", str(out)]
    assert accelerate.main(arguments) == 0
    assert set(json.loads(out.read_text())) == {
        "core", "save_state", "save_state, stock_files=True", "stock",
    }  # fmt: skip


@pytest.mark.slow
def test_the_cost_of_a_step_is_measured_in_every_host(tmp_path, monkeypatch):
    from benchmarks import overhead

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    out = tmp_path / "out.json"
    assert overhead.main(["--steps", "3", "--rounds", "1", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert set(found) == {"Lightning", "Accelerate", "Trainer"}
    assert all(set(each) == {"stock", "ours", "more"} for each in found.values())


@pytest.mark.slow
def test_checkpoints_of_adapters_are_weighed_beside_those_of_stock(tmp_path):
    pytest.importorskip("peft")
    shape = ["--hidden", "64", "--layers", "1", "--vocabulary", "50", "--saves", "2", "--layouts", "single"]
    out = tmp_path / "out.json"
    assert trainable.main([*shape, "--root", str(tmp_path), "--json", str(out)]) == 0
    found = json.loads(out.read_text())["single"]
    assert found.keys() == set(trainable.CONTENDERS)
    assert all(each["bytes"] > 4 * 3 * each["trained"] for each in found.values())
