"""Plans: bytes by rank, times, the interval, a month of saves, and what bad input is refused with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt_core import (
    CheckpointManager,
    EverySeconds,
    EverySteps,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLatest,
    TrainState,
)
from ckpt_core.cadence import FailureRate, MaxOverhead, Optimal, SaveCosts
from ckpt_core.cli import main
from ckpt_core.errors import ConfigError
from ckpt_core.planning import (
    PlanNumbers,
    PlanTerms,
    RankLayout,
    StorageProfile,
    TrainedState,
    find_model,
    make_plan,
    save_times,
)
from ckpt_core.planning._month import MONTH, PlannedSave, kept_of, saves_at, saves_of
from ckpt_core.planning._state_sizes import OPTIMIZERS, state_components
from ckpt_core.retention import plan_prune
from ckpt_core.types import CheckpointInfo

GB = 1e9
WIDTH, LAYERS = 512, 6


def tower() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def terms(model: str = "70B", **changes) -> PlanTerms:
    given = {
        "state": TrainedState(),
        "layout": RankLayout(ranks=64),
        "storage": StorageProfile(name="test", write=2 * GB, read=4 * GB, gb_month=0.02),
        "keep": {"3": KeepLatest(3)},
    }
    return PlanTerms(model=find_model(model), **{**given, **changes})


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

    state = TrainedState(optimizer=name, weights="fp32")
    plan = make_plan(terms("planned_tower:build", state=state, layout=RankLayout(ranks=1)))

    assert plan.size_bytes == pytest.approx(written, rel=0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "sgd", "adafactor"])
def test_moments_are_what_the_optimizer_of_torch_holds(optimizer, tmp_path, monkeypatch):
    (tmp_path / "planned_layer.py").write_text("import torch\ndef build(): return torch.nn.Linear(300, 200)")
    monkeypatch.syspath_prepend(str(tmp_path))
    layer = torch.nn.Linear(300, 200)
    make = {
        "adamw": torch.optim.AdamW,
        "sgd": lambda each: torch.optim.SGD(each, lr=0.1),
        "sgd-momentum": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
        "adafactor": torch.optim.Adafactor,
    }
    real = make[optimizer](layer.parameters())
    layer(torch.randn(2, 300)).sum().backward()
    real.step()
    held = [each for state in real.state.values() for name, each in state.items() if name != "step"]
    expected = sum(each.numel() * 4 for each in held if isinstance(each, torch.Tensor))

    state = TrainedState(optimizer=optimizer, weights="fp32")
    found = {
        each.name: each.size_bytes for each in state_components(find_model("planned_layer:build"), state)
    }

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
    state = TrainedState(master="fp32", gradients="bf16")

    found = {
        each.name: each.size_bytes for each in state_components(find_model("planned_adapter:build"), state)
    }

    assert found["weights"] == 2 * (10_100 + 202)
    assert (found["master weights"], found["moments"], found["gradients"]) == (4 * 202, 8 * 202, 2 * 202)


def test_every_optimizer_has_a_size_for_a_number_and_for_shapes(tmp_path):
    values = {"model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_layer": 2, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for model in ("7B", str(tmp_path)):
        shapes = find_model(model)
        sizes = {
            name: sum(each.size_bytes for each in state_components(shapes, TrainedState(optimizer=name)))
            for name in OPTIMIZERS
        }
        weights = 2 * shapes.parameters

        assert sizes["none"] == sizes["sgd"] == weights
        assert sizes["sgd-momentum"] == sizes["lion"] == 3 * weights
        assert sizes["adamw"] == sizes["adam"] == 5 * weights
        assert (
            weights
            < sizes["adafactor"]
            < sizes["adamw-8bit"]
            < sizes["lion"]
            <= sizes["muon"]
            < sizes["adamw"]
        )


# ---- ranks


@given(
    dp=st.integers(1, 12),
    tp=st.integers(1, 12),
    pp=st.integers(1, 12),
    strategy=st.sampled_from(["ddp", "fsdp", "hsdp"]),
    one=st.booleans(),
)
def test_all_ranks_together_write_each_byte_once(dp, tp, pp, strategy, one):
    layout = RankLayout(ranks=dp * tp * pp, tp=tp, pp=pp, strategy=strategy, one_replica=one)
    total = 10**9

    assert total <= layout.written(total) * layout.writers < total + layout.writers
    assert layout.held(total) * layout.ranks >= total * layout.copies
    assert layout.writers * (layout.copies if one else 1) == layout.ranks
    assert layout.copies == {"ddp": dp, "fsdp": 1, "hsdp": dp // layout.sharded}[strategy]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ranks": 10, "tp": 4}, "does not divide 10 ranks"),
        ({"ranks": 0}, "ranks must be a whole number"),
        ({"ranks": 8, "tp": -1}, "tp must be"),
        ({"ranks": 16, "strategy": "hsdp", "shards": 5}, "5 shards do not divide the 16"),
        ({"ranks": 16, "shards": 4}, "those of the layout hsdp"),
        ({"ranks": 4, "strategy": "zero"}, "must be one of"),
    ],
)
def test_layouts_that_cannot_be_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        RankLayout(**changes)


# ---- times and interval


def test_rates_count_for_nodes_ranks_or_the_job():
    storage = {"write": 1 * GB, "read": 2 * GB, "commit_seconds": 0.0}
    numbers = PlanNumbers(call_seconds=0.0, staging_rate=1e15)
    for rate_of, nodes in (("job", 1), ("node", 8), ("rank", 64)):
        profile = StorageProfile(name="test", rate_of=rate_of, **storage)
        times = save_times(terms(storage=profile, numbers=numbers), 64 * 10**9)

        assert times.durable == pytest.approx(64 / nodes, rel=1e-3)
        assert times.restore == pytest.approx(32 / nodes, rel=1e-3)


def test_a_save_stalls_for_its_copy_or_what_the_next_step_waits_for_or_until_it_is_durable():
    numbers = PlanNumbers(call_seconds=1.0, staging_rate=1 * GB, step_seconds=4.0, slowdown=0.1)
    storage = StorageProfile(name="test", write=1 * GB, read=1 * GB, rate_of="rank", commit_seconds=2.0)
    found = {
        mode: save_times(terms(numbers=numbers, storage=storage, mode=mode), 64 * 10 * 10**9)
        for mode in ("blocking", "overlapped", "sync")
    }

    assert (found["blocking"].stall, found["blocking"].durable) == pytest.approx((11, 23))
    assert (found["overlapped"].stall, found["overlapped"].durable) == pytest.approx((7, 13))
    assert (found["sync"].stall, found["sync"].durable) == pytest.approx((13, 13))
    assert found["blocking"].cost == pytest.approx(11 + 0.1 * 12)


def test_no_interval_loses_less_than_the_recommended_one():
    plan = make_plan(terms(mtbf=6 * 3600.0))
    least = plan.overhead_at(plan.recommended)

    for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0):
        assert plan.overhead_at(max(plan.recommended * factor, plan.times.durable)) >= least


def test_measured_values_take_the_place_of_computed_ones():
    measured = {"size_bytes": 5e9, "stall_seconds": 1.5, "durable_seconds": 20.0, "restore_seconds": 9.0}

    plan = make_plan(terms(measured=measured))

    assert plan.size_bytes == 5 * 10**9
    assert (plan.times.stall, plan.times.durable, plan.times.restore) == (1.5, 20.0, 9.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"save": 0.0}, "save must be above 0"),
        ({"save": 0.001}, "blocks training"),
        ({"mtbf": -1.0}, "mtbf must be above 0"),
        ({"measured": {"stall_seconds": 0.0}}, "stall_seconds must be above 0"),
        ({"mode": "quick"}, "mode must be one of"),
        ({"numbers": PlanNumbers(failures_per_gpu_hour=0.0)}, "without failures there is no best interval"),
        ({"save": EverySteps(10**9)}, "not one save is made"),
        ({"save": EverySteps(5), "numbers": PlanNumbers(step_seconds=0.001)}, "steps of 0.001 s"),
        ({"save": 5.0, "measured": {"stall_seconds": 1.0}}, "more than the 300,000"),
    ],
)
def test_plans_that_cannot_be_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        make_plan(terms(**changes))


@pytest.mark.parametrize("name", ["gpu_hour", "slowdown", "rank_bytes", "staging_rate"])
def test_numbers_below_zero_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} must be a finite number of at least 0"):
        PlanNumbers(**{name: -1.0})


# ---- a month of saves


def costs(stall: float = 0.0) -> tuple[SaveCosts, FailureRate]:
    found = SaveCosts(stall=stall, slowdown=0.0, durable=stall, uploaded=None, saves=1, lost=0.0, step=60.0)
    return found, FailureRate(3600.0, "test")


def test_a_policy_decides_on_the_saves_of_the_month():
    every = saves_of(EverySteps(60) | EverySeconds(10**9), *costs())
    assert [each.step for each in every[:3]] == [60, 120, 180]
    assert len(every) == 720

    blocked = saves_of(EverySteps(60), *costs(stall=3600.0))
    assert len(blocked) == 360  # an hour of training, an hour of saving


def test_policies_that_follow_costs_are_fed_with_those_of_the_plan():
    known = {"mtbf": 6 * 3600.0, "numbers": PlanNumbers(step_seconds=60.0)}
    best = make_plan(terms(**known)).recommended

    for policy in (Optimal(), Optimal(mtbf="6h")):
        assert (
            best <= make_plan(terms(save=policy, **known)).month.interval <= best + 61
        )  # at the end of a step
    share = make_plan(terms(save=MaxOverhead(0.0003), **known)).month.saving
    assert share == pytest.approx(0.0003, rel=0.02)


def test_what_is_kept_is_what_the_real_policies_keep():
    month = saves_at(6 * 3600.0, 10.0)

    latest = kept_of(KeepLatest(3), "3", month)
    assert (latest.at_end, latest.peak) == (3, 4)
    assert latest.mean == pytest.approx(3, rel=0.03)
    assert kept_of(KeepAll(), "all", month).mean == pytest.approx(59.5)
    assert kept_of(KeepLatest(1) | KeepBest("loss", n=4), "best", month).at_end in {4, 5}


@given(st.integers(40, 400), st.integers(1, 200), st.integers(1, 90))
def test_a_large_history_is_counted_to_three_percent(saves, latest, every):
    """Against a prune after every single save."""
    assume(latest > 32)
    policy = KeepLatest(latest) | KeepEvery(every * 100)
    month = [PlannedSave(100 * number, number * MONTH / saves) for number in range(1, saves + 1)]
    held, area, before = [], 0.0, 0.0
    for save in month:
        area, before = area + len(held) * (save.time - before), save.time
        held.append(CheckpointInfo(step=save.step, name=str(save.step), created=save.time))
        gone = {each.step for each in plan_prune(policy, held, save.time).drop}
        held = [each for each in held if each.step not in gone]

    kept = kept_of(policy, "", month)

    assert len(held) <= kept.at_end <= 1.04 * len(held) + 1
    assert area / MONTH <= kept.mean + 1e-6 <= 1.04 * area / MONTH + 1.1


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
    gpu = next(line for line in out.splitlines() if line.startswith("price of a GPU"))
    assert "2.5 $/h" in gpu
    assert "given" in gpu
    assert "--failures-per-gpu-hour" not in out  # --mtbf takes its place


def test_the_json_has_the_keys_of_the_page(capsys):
    """docs/planning.md names every key, and no other."""
    assert main(["plan", "7B", "--json", "--keep", "{latest: 2}", "--upload", "s3"]) == 0
    record = json.loads(capsys.readouterr().out)
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")]
    named = {name.strip("`") for row in rows for name in row.split(", ")}

    def keys(value, prefix=""):
        if isinstance(value, list):
            return set().union(*(keys(each, f"{prefix}[]") for each in value))
        if not isinstance(value, dict):
            return {prefix}
        return set().union(*(keys(each, f"{prefix}.{name}".lstrip(".")) for name, each in value.items()))

    assert keys(record) <= named
    assert {each for each in named if each.split(".")[0].split("[")[0] in record} == keys(record)


def test_the_picture_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")

    assert main(["plan", "7B", "--picture", str(tmp_path / "plan.png"), "--keep", "{latest: 1}"]) == 0

    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "7B", "--picture", str(tmp_path / "plan.nothing"), "--keep", "{latest: 1}"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    assert main(["plan", "7B", "--picture", "plan.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["70 llamas"], "is no model"),
        (["1e400"], "are no model"),
        (["9" * 400 + "T"], "are no model"),
        (["sys:exit"], "failed on the meta device"),
        (["7B", "--ranks", "10", "--tp", "4"], "does not divide"),
        (["7B", "--storage", "floppy"], "neither one of"),
        (["7B", "--write-gbps", "-1"], "--write-gbps"),
        (["7B", "--write-gbps", "0"], "--write-gbps"),
        (["7B", "--gb-month", "-0.02"], "gb_month must be"),
        (["7B", "--gpu-hour", "-4"], "gpu_hour must be"),
        (["7B", "--gpu-hour", "nan"], "gpu_hour must be"),
        (["7B", "--mtbf", "soon"], "--mtbf must be seconds"),
        (["7B", "--save", "0s"], "--save must be seconds"),
        (["7B", "--save", "{every_parsec: 1}"], "every_parsec"),
        (["7B", "--save", "{every_tokens: 1000}"], "counts tokens"),
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
