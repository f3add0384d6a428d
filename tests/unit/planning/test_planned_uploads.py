"""Plans with upload tiers, experts and second files."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation import ExponentialFailures, Scenario, SimulatedJob, simulate
from benchmarks.simulation._tiers_of_run import TiersOfRun
from ckpt_core import EverySeconds, KeepLatest
from ckpt_core.cadence import Optimal, optimal_interval
from ckpt_core.cli import main
from ckpt_core.errors import ConfigError
from ckpt_core.planning import (
    PlannedUpload,
    PlanNumbers,
    RankLayout,
    StorageProfile,
    find_model,
    find_storage,
    make_plan,
)
from ckpt_core.planning._month import PlannedSave
from ckpt_core.planning._planned_uploads import TierLosses, UploadTimes, uploads_of
from tests.unit.planning.test_cost_plan import GB, terms

FAST = StorageProfile(name="fast", write=100 * GB, read=100 * GB, commit_seconds=0.0)
BUCKET = StorageProfile(
    name="bucket", write=1 * GB, read=2 * GB, commit_seconds=0.5, gb_month=0.02, egress=0.1
)


def upload(**changes) -> PlannedUpload:
    return PlannedUpload(**{"name": "bucket", "storage": BUCKET, "keep": KeepLatest(3), **changes})


def test_a_tier_has_its_own_rate_retention_and_money():
    plan = make_plan(
        terms(storage=FAST, save=3600.0, uploads=[upload(every=10), upload(bandwidth=0.01 * GB)])
    )
    often, slow = plan.uploads

    assert often.times.rate == 8 * GB  # 8 nodes
    assert often.times.upload == pytest.approx(plan.size_bytes / (8 * GB) + 0.5)
    assert often.times.uploaded == plan.times.durable + often.times.upload
    assert often.count == 72
    assert often.retention.kept.at_end == 3
    mean = often.retention.mean_bytes / plan.size_bytes
    assert often.retention.storage_dollars == pytest.approx(mean * plan.size_bytes / GB * 0.02)
    assert slow.times.rate == 64 * 0.01 * GB
    assert slow.count == pytest.approx(720, abs=2)  # 1,094 s each
    assert slow.times.restore == pytest.approx(plan.size_bytes / (16 * GB))


@given(gap=st.integers(1, 50), count=st.integers(1, 40), every=st.integers(1, 4), seconds=st.integers(1, 200))
def test_uploads_follow_and_overtake_one_another_as_in_the_simulation(gap, count, every, seconds):
    times = UploadTimes(upload=seconds, uploaded=seconds, rate=1.0, restore=1.0)
    saves = [PlannedSave(n, float(n * gap)) for n in range(1, count + 1)]
    tiers, held = TiersOfRun(seconds, None), {0}
    for now in range(count * gap + 1):
        if now and now % (gap * every) == 0 and now // gap <= count:
            tiers.begin(now, now // gap)
        tiers.settle(now)
        held.add(tiers.upload)

    found = [each for each in uploads_of(saves, every, times) if each.time <= count * gap]
    assert {each.step for each in found} | {0} == held


@pytest.mark.parametrize(("every", "uploaded"), [(1, 60.0), (1, 600.0)])
def test_what_is_lost_where_only_the_tier_is_left_is_what_the_simulation_loses(every, uploaded):
    mtbf, interval, cost, durable = 6 * 3600.0, 900.0, 5.0, 20.0
    job = SimulatedJob(
        work=30 * 86_400.0,
        step=1.0,
        stall=cost,
        durable=durable,
        uploaded=uploaded,
        node_loss=1.0,
        down=120.0,
    )
    found = simulate(EverySeconds(interval), Scenario(job=job, trace=ExponentialFailures(mtbf)), runs=60)
    times = UploadTimes(upload=uploaded - durable, uploaded=uploaded, rate=1.0, restore=0.0)
    losses = TierLosses(cost=cost, times=times, every=every, mtbf=mtbf, restart=120.0)

    assert 1 - losses.overhead(interval) == pytest.approx(found.goodput, abs=0.005)


def test_the_interval_of_a_tier_is_that_of_the_policy():
    plan = make_plan(terms(storage=FAST, save=Optimal(tier="upload"), mtbf=3600.0, uploads=[upload()]))
    (tier,) = plan.uploads

    known = {"cost": plan.times.cost, "durable": tier.times.uploaded, "mtbf": 3600.0}
    assert tier.losses.interval == optimal_interval(**known)
    assert tier.losses.interval <= plan.month.interval <= tier.losses.interval + 11  # at the end of a step


@pytest.mark.parametrize("every", [1, 10])
def test_no_interval_loses_less_where_failures_leave_the_tier_only(every):
    numbers = PlanNumbers(node_loss=0.5)
    plan = make_plan(terms(storage=FAST, mtbf=6 * 3600.0, uploads=[upload(every=every)], numbers=numbers))

    least = plan.overhead_at(plan.recommended)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert plan.overhead_at(plan.recommended * factor) >= least
    assert plan.uploads[0].retention.egress_dollars > 0


def test_second_files_are_written_and_kept_and_neither_held_nor_restored():
    one, two = (make_plan(terms(replicas=count, save=3600.0)) for count in (1, 2))

    assert two.written_bytes == 2 * one.written_bytes
    assert two.month.written_bytes == 2 * one.month.written_bytes
    assert two.retention[0].mean_bytes == 2 * one.retention[0].mean_bytes
    assert (two.held_bytes, two.times.restore, two.times.stall) == (
        one.held_bytes,
        one.times.restore,
        one.times.stall,
    )


# ---- experts


def mixture() -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.attention = torch.nn.Linear(64, 64, bias=False)
    layer.mlp = torch.nn.Module()
    layer.mlp.experts = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(8))
    layer.mlp.shared_experts = torch.nn.Linear(64, 64, bias=False)
    return layer


def test_experts_are_known_by_config_by_module_and_by_number(tmp_path, monkeypatch):
    (tmp_path / "moe.py").write_text("from tests.unit.planning.test_planned_uploads import mixture\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
                "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000,
            }
        )
    )  # fmt: skip

    assert find_model("moe:mixture").experts == 8 * 64 * 64
    assert find_model(str(tmp_path)).experts == 32 * 8 * 3 * 4096 * 14336
    assert find_model("47B").experts == 0


@given(
    nodes=st.integers(1, 6),
    ep=st.sampled_from([1, 2, 4, 8, 16]),
    strategy=st.sampled_from(["ddp", "fsdp", "hsdp"]),
    one=st.booleans(),
)
def test_all_ranks_together_hold_and_write_each_byte_of_experts(nodes, ep, strategy, one):
    ranks = 16 * nodes
    layout = RankLayout(ranks=ranks, ep=ep, strategy=strategy, one_replica=one)
    dense, experts = 10**6 * ranks, 7 * 10**6 * ranks

    held = layout.held(dense + experts, experts)
    assert held * ranks == dense * layout.copies + experts * layout.expert_copies
    assert layout.expert_copies <= layout.copies
    if strategy == "ddp":
        assert held == dense + experts // ep
    assert layout.written(dense + experts, experts) * layout.writers >= dense + experts


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["47B", "--ep", "8"], "has no experts"),
        (["47B", "--ep", "3", "--expert-parameters", "40B"], "ep 3 must divide"),
        (["47B", "--expert-parameters", "48B"], "must be a part of"),
        (["7B", "--upload", "floppy"], "neither one of"),
        (["7B", "--upload", "{every: 2}"], "needs `to`"),
        (["7B", "--upload", "{to: s3, evry: 2}"], "knows no evry"),
        (["7B", "--upload", "{to: s3, every: 0}"], "every must be"),
        (["7B", "--upload", "{to: s3, keep: {lattest: 3}}"], "latest"),
        (["7B", "--node-loss", "0.1"], "give --upload"),
        (["7B", "--upload", "s3", "--node-loss", "1.1"], "at most 1"),
    ],
)
def test_what_cannot_be_is_one_plain_line(arguments, named, capsys):
    assert main(["plan", *arguments]) == 2

    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_a_url_is_the_storage_of_its_scheme():
    assert find_storage("s3://bucket/run") == find_storage("s3")
    with pytest.raises(ConfigError):
        find_storage("ftp://host/run")
