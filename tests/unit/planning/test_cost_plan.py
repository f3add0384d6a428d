"""Plans: bytes by rank, times, the interval, a month of saves, and what bad input is refused with."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt_core import (
    CheckpointManager,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepWeights,
    KeepWithin,
    TrainState,
)
from ckpt_core.cli import main
from ckpt_core.errors import ConfigError
from ckpt_core.planning import CostPlan, PlanTerms, find_model, kept_of
from ckpt_core.planning._costs import MONTH
from ckpt_core.planning._terms import OPTIMIZERS
from ckpt_core.retention import plan_prune
from ckpt_core.types import CheckpointInfo

GB = 1e9
WIDTH, LAYERS = 512, 6


def tower() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


STORAGE = {"storage": "nvme", "rate_of": "node", "write_gbps": 2 * GB, "read_gbps": 4 * GB, "gb_month": 0.02}


def plan_of(model: str = "70B", **changes) -> CostPlan:
    given = {"ranks": 64, "keep": {"3": KeepLatest(3)}, **STORAGE, **changes}
    return CostPlan(PlanTerms(model=find_model(model), **given))


def sizes(plan: CostPlan) -> dict[str, int]:
    return {each.name: each.size_bytes for each in plan.components}


# ---- bytes


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "none"])
def test_a_plan_of_a_real_model_is_what_its_save_writes(name, tmp_path, monkeypatch):
    """The directory of a real save, all files of it, against the plan of the same function: within 1 %."""
    model = tower()
    make = {
        "adamw": torch.optim.AdamW,
        "sgd-momentum": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
    }
    items = {}
    if name in make:
        optimizer = make[name](model.parameters())
        model(torch.randn(2, WIDTH)).sum().backward()
        optimizer.step()
        items["optimizer"] = optimizer
    with CheckpointManager(tmp_path / "root") as checkpoints:
        checkpoints.save(1, TrainState(model=model, **items)).result()
    written = sum(each.stat().st_size for each in (tmp_path / "root").rglob("*") if each.is_file())
    (tmp_path / "planned_tower.py").write_text(
        "import torch\n"
        f"def build():\n    layers = (torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS}))\n"
        "    return torch.nn.Sequential(*layers)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    plan = plan_of("planned_tower:build", optimizer=name, weights="fp32", ranks=1)

    assert plan.size_bytes == pytest.approx(written, rel=0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "sgd"])
def test_moments_are_what_the_optimizer_of_torch_holds(optimizer, tmp_path, monkeypatch):
    (tmp_path / "planned_layer.py").write_text("import torch\ndef build(): return torch.nn.Linear(300, 200)")
    monkeypatch.syspath_prepend(str(tmp_path))
    layer = torch.nn.Linear(300, 200)
    make = {
        "adamw": torch.optim.AdamW,
        "sgd": lambda each: torch.optim.SGD(each, lr=0.1),
        "sgd-momentum": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
    }
    real = make[optimizer](layer.parameters())
    layer(torch.randn(2, 300)).sum().backward()
    real.step()
    held = [each for state in real.state.values() for name, each in state.items() if name != "step"]
    expected = sum(each.numel() * 4 for each in held if isinstance(each, torch.Tensor))

    found = sizes(plan_of("planned_layer:build", optimizer=optimizer, weights="fp32"))

    assert found["moments"] == expected


def test_frozen_parameters_have_weights_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "planned_adapter.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 2))\n"
        "    model[0].requires_grad_(False)\n"
        "    return model\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = sizes(plan_of("planned_adapter:build", weights="bf16", master="fp32", gradients="bf16"))

    assert found["weights"] == 2 * (10_100 + 202)
    assert (found["master weights"], found["moments"], found["gradients"]) == (4 * 202, 8 * 202, 2 * 202)


def test_every_optimizer_has_a_size():
    found = {name: plan_of("7B", optimizer=name, rank_bytes=0.0).size_bytes for name in OPTIMIZERS}
    weights = 2 * 7 * 10**9

    assert found["none"] == found["sgd"] == weights
    assert found["sgd-momentum"] == found["lion"] == found["muon"] == 3 * weights
    assert found["adamw"] == found["adam"] == 5 * weights
    assert weights < found["adafactor"] < found["adamw-8bit"] < found["lion"]


# ---- ranks


@given(
    dp=st.integers(1, 12),
    tp=st.integers(1, 12),
    pp=st.integers(1, 12),
    strategy=st.sampled_from(["ddp", "fsdp", "hsdp"]),
    one=st.booleans(),
)
def test_all_ranks_together_write_each_byte_once(dp, tp, pp, strategy, one):
    total = 10**9
    plan = plan_of(ranks=dp * tp * pp, tp=tp, pp=pp, layout=strategy, one_replica=one, size=total)

    assert total <= plan.written_bytes * plan.writers < total + plan.writers
    assert plan.held_bytes * dp * tp * pp >= total * plan.copies
    assert plan.writers * (plan.copies if one else 1) == dp * tp * pp
    assert plan.copies == {"ddp": dp, "fsdp": 1, "hsdp": dp // plan.terms.sharded}[strategy]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ranks": 10, "tp": 4}, "does not divide 10 ranks"),
        ({"ranks": 0}, "ranks must be a whole number"),
        ({"ranks": 8, "tp": -1}, "tp must be"),
        ({"ranks": 16, "layout": "hsdp", "shards": 5}, "5 shards do not divide the 16"),
        ({"ranks": 16, "shards": 4}, "those of the layout hsdp"),
        ({"ranks": 4, "layout": "zero"}, "must be one of"),
    ],
)
def test_layouts_that_cannot_be_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        plan_of(**changes)


# ---- times and interval


def test_rates_count_for_nodes_ranks_or_the_job():
    rates = {"write_gbps": 1 * GB, "read_gbps": 2 * GB, "commit_seconds": 0.0, "size": 64 * 10**9}
    for rate_of, nodes in (("job", 1), ("node", 8), ("rank", 64)):
        plan = plan_of(rate_of=rate_of, call_seconds=0.0, staging_rate=1e15, **rates)

        assert plan.durable == pytest.approx(64 / nodes, rel=1e-3)
        assert plan.restore == pytest.approx(32 / nodes, rel=1e-3)


def test_a_save_stalls_for_its_copy_or_what_the_next_step_waits_for_or_until_it_is_durable():
    numbers = {"call_seconds": 1.0, "staging_rate": 1 * GB, "step_seconds": 4.0, "slowdown": 0.1}
    storage = {"write_gbps": 1 * GB, "read_gbps": 1 * GB, "rate_of": "rank", "commit_seconds": 2.0}
    modes = ("blocking", "overlapped", "sync")
    found = {mode: plan_of(size=64 * 10 * 10**9, mode=mode, **{**numbers, **storage}) for mode in modes}

    assert (found["blocking"].stall, found["blocking"].durable) == pytest.approx((11, 23))
    assert (found["overlapped"].stall, found["overlapped"].durable) == pytest.approx((7, 13))
    assert (found["sync"].stall, found["sync"].durable) == pytest.approx((13, 13))
    assert found["blocking"].cost == pytest.approx(11 + 0.1 * 12)


def test_no_interval_loses_less_than_the_recommended_one():
    plan = plan_of(mtbf=6 * 3600.0)
    least = plan.overhead_at(plan.recommended)

    for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0):
        assert plan.overhead_at(max(plan.recommended * factor, plan.durable)) >= least


def test_measured_values_take_the_place_of_computed_ones():
    plan = plan_of(size=5 * 10**9, stall_seconds=1.5, durable_seconds=20.0, restore_seconds=9.0)

    assert plan.size_bytes == 5 * 10**9
    assert (plan.stall, plan.durable, plan.restore) == (1.5, 20.0, 9.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"save": 0.0}, "save must be a finite number above 0"),
        ({"save": 0.001}, "blocks training"),
        ({"mtbf": -1.0}, "mtbf must be a finite number above 0"),
        ({"stall_seconds": 0.0}, "stall_seconds must be a finite number above 0"),
        ({"mode": "quick"}, "mode must be one of"),
        ({"failures_per_gpu_hour": 0.0}, "without failures there is no best interval"),
        ({"save": 1e9}, "0 saves in 30 days"),
        ({"save": 5.0, "stall_seconds": 1.0}, "only 1 to 300,000"),
    ],
)
def test_plans_that_cannot_be_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        plan_of(**changes)


@pytest.mark.parametrize("name", ["gpu_hour", "slowdown", "rank_bytes"])
def test_numbers_below_zero_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} must be a finite number of at least 0"):
        plan_of(**{name: -1.0})


# ---- a month of saves


def test_what_is_kept_is_what_the_real_policies_keep():
    month = [(2160 * number, 6 * 3600.0 * number) for number in range(1, 121)]

    latest = kept_of(KeepLatest(3), month)
    assert (latest.checkpoints_at_end, latest.checkpoints_at_peak) == (3, 4)
    assert latest.checkpoints_mean == pytest.approx(3, rel=0.03)
    assert kept_of(KeepAll(), month).checkpoints_mean == pytest.approx(59.5)
    assert kept_of(KeepLatest(1) | KeepBest("loss", n=4), month).checkpoints_at_end in {4, 5}


def test_of_what_is_demoted_only_the_weights_are_counted_also_within_a_budget():
    month = [(number, number * MONTH / 100) for number in range(1, 101)]
    rule = KeepLatest(2) | KeepWeights(KeepEvery(10), dtype="bf16")
    sizes = {"size_bytes": 120, "weights_bytes": {"bf16": 20, None: 40}.__getitem__}

    kept = kept_of(rule, month, **sizes)
    assert (kept.checkpoints_at_end, kept.checkpoints_at_peak) == (11, 12)
    assert kept.peak_bytes == 3 * 120 + 9 * 20
    assert kept_of(rule & KeepWithin(300), month, **sizes).peak_bytes <= 300 + 120

    plan = plan_of(keep={"": rule}, save=3600.0, step_seconds=3600.0).record()
    whole = plan_of(keep={"": KeepLatest(2) | KeepEvery(10)}, save=3600.0, step_seconds=3600.0).record()
    (light,), (heavy,) = plan["retention"], whole["retention"]
    assert light["checkpoints_mean"] == heavy["checkpoints_mean"]
    assert light["storage_dollars"] < 0.4 * heavy["storage_dollars"]


@given(st.integers(40, 400), st.integers(1, 200), st.integers(1, 90))
def test_a_large_history_is_counted_to_three_percent(saves, latest, every):
    """Against a prune after every single save."""
    assume(latest > 32)
    policy = KeepLatest(latest) | KeepEvery(every * 100)
    month = [(100 * number, number * MONTH / saves) for number in range(1, saves + 1)]
    held, area, before = [], 0.0, 0.0
    for step, time in month:
        area, before = area + len(held) * (time - before), time
        held.append(CheckpointInfo(step=step, name=str(step), created=time))
        gone = {each.step for each in plan_prune(policy, held, time).drop}
        held = [each for each in held if each.step not in gone]

    kept = kept_of(policy, month)

    assert len(held) <= kept.checkpoints_at_end <= 1.04 * len(held) + 1
    assert area / MONTH <= kept.checkpoints_mean + 1e-6 <= 1.04 * area / MONTH + 1.1


# ---- the command


def test_the_command_prints_every_assumption_with_its_option(capsys):
    assert main(["plan", "7B", "--gpu-hour", "2.5", "--mtbf", "6h", "--storage", "gcs"]) == 0
    out = capsys.readouterr().out

    for word in (
        "weights",
        "moments",
        "stall",
        "recommended",
        "{latest: 3}",
        "--staging-rate",
        "--step-seconds",
    ):
        assert word in out
    gpu = next(line for line in out.splitlines() if "--gpu-hour" in line)
    assert " 2.5 " in gpu
    assert "given" in gpu
    assert "--failures-per-gpu-hour" not in out  # --mtbf takes its place


def test_the_schema_says_of_every_key_of_the_json_what_it_means_and_of_no_other(capsys):
    assert main(["plan", "7B", "--compress", "--json", "--keep", "{latest: 2}"]) == 0
    record = json.loads(capsys.readouterr().out)
    schema = json.loads((Path(__file__).parents[3] / "docs" / "schemas" / "plan.json").read_text())

    def keys(value, prefix=""):
        if isinstance(value, list):
            return set().union(*(keys(each, f"{prefix}[]") for each in value))
        if not isinstance(value, dict):
            return {prefix}
        return set().union(*(keys(each, f"{prefix}.{name}".lstrip(".")) for name, each in value.items()))

    def described(part, prefix=""):
        if "items" in part:
            return described(part["items"], f"{prefix}[]")
        if "properties" not in part:
            return {prefix} if part.get("description") else set()
        named = part["properties"].items()
        return set().union(*(described(each, f"{prefix}.{name}".lstrip(".")) for name, each in named))

    assert described(schema) == keys(record)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["70 llamas"], "is no model"),
        (["1e400"], "are no model"),
        (["9" * 400 + "T"], "are no model"),
        (["sys:exit"], "failed on the meta device"),
        (["7B", "--ranks", "10", "--tp", "4"], "does not divide"),
        (["7B", "--storage", "floppy"], "neither one of"),
        (["7B", "--storage", "nfs://server/share"], "neither one of"),
        (["7B", "--write-gbps", "-1"], "--write-gbps"),
        (["7B", "--write-gbps", "0"], "--write-gbps"),
        (["7B", "--gb-month", "-0.02"], "gb_month must be"),
        (["7B", "--gpu-hour", "-4"], "gpu_hour must be"),
        (["7B", "--gpu-hour", "nan"], "gpu_hour must be"),
        (["7B", "--mtbf", "soon"], "--mtbf must be seconds"),
        (["7B", "--save", "0s"], "--save must be seconds"),
        (["7B", "--save", "{every_steps: 1}"], "--save must be seconds"),
        (["7B", "--ranks", "many"], "--ranks must be a whole number"),
        (["7B", "--staging-rate", "-1"], "--staging-rate"),
        (["7B", "--keep", "{lattest: 3}"], "latest"),
        (["7B", "--size", "big"], "--size"),
        (["7B", "--part-bytes", "0"], "--part-bytes"),
    ],
)
def test_bad_input_is_one_plain_line(arguments, named, capsys):
    assert main(["plan", *arguments]) == 2

    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_a_plan_of_a_number_imports_no_torch():
    code = "import sys; from ckpt_core.cli import main; main(['plan', '7B', '--keep', '{latest: 1}']); "
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code + "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_compression_stores_fewer_bytes_of_what_was_measured_and_no_fewer_of_the_rest():
    plain, small = plan_of(gradients="bf16"), plan_of(gradients="bf16", compress="planes")
    found = sizes(small)
    expected = found | {"weights": found["weights"] / 1.44, "moments": found["moments"] / 1.21}

    assert small.stored_bytes == pytest.approx(sum(expected.values()))
    assert (plain.stored_bytes, plain.size_bytes) == (small.size_bytes, small.size_bytes)
    assert (
        small.record()["compression"]["without"]["written_bytes"] == plain.record()["month"]["written_bytes"]
    )


def test_a_codec_that_is_slower_than_the_storage_is_what_a_save_waits_for():
    where = {"write_gbps": 1e12, "cores": 1, "commit_seconds": 0.0}
    fast, slow = plan_of(**where), plan_of(compress="planes", **where)
    seconds = sum(
        each.size_bytes / rate
        for each in slow.components
        for rate in [{"weights": 400e6, "moments": 620e6}.get(each.name, math.inf)]
    )

    assert slow.durable == pytest.approx(slow.stall + seconds / slow.writers)
    assert plan_of(compress="auto", **where).durable == pytest.approx(fast.durable)


def test_auto_is_as_good_as_the_best_codec_at_any_rate():
    for rate in (0.05e9, 0.2e9, 1e9, 3e9, 100e9):
        times = {
            codec: plan_of(compress=codec, write_gbps=rate, rate_of="node").durable
            for codec in (None, "zstd", "planes", "auto")
        }
        assert times["auto"] == min(times.values())


def test_a_run_of_ninety_days_costs_three_months():
    month, run = (plan_of(days=days, save=3600.0).record() for days in (30, 90))

    assert run["month"]["saves"] == 3 * month["month"]["saves"]
    assert run["month"]["lost_gpu_dollars"] == pytest.approx(3 * month["month"]["lost_gpu_dollars"])
    assert run["retention"][0]["storage_dollars"] == pytest.approx(
        3 * month["retention"][0]["storage_dollars"], rel=0.01
    )


@pytest.mark.parametrize("given", [{"ratio": 1.4}, {"compress": "zstd", "ratio": 0.9}, {"days": 0.0}])
def test_what_cannot_be_compressed_or_planned_is_refused(given):
    with pytest.raises(ConfigError):
        plan_of(**given)
