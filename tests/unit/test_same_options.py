"""Ranks that are given different options are refused, before anything depends on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import distributed

from ckpt_core import (
    CheckpointManager,
    CheckpointOptions,
    EverySeconds,
    EverySteps,
    Export,
    KeepBest,
    KeepLatest,
    OnPreemption,
    Upload,
)
from ckpt_core.cadence import Optimal
from ckpt_core.collective import SameOptions
from ckpt_core.coordination import Solo
from ckpt_core.errors import ConfigError
from ckpt_core.options import difference, given_options
from ckpt_core.policies import SavePolicy
from tests.kit.ranks import run_ranks


def signer(name: str, manifest: bytes) -> bytes:
    return manifest + name.encode()


def judge(name: str, manifest: bytes, signature: bytes) -> bool:
    return signature == signer(name, manifest)


MUST_BE_THE_SAME: dict[str, Any] = {
    "save": EverySteps(5),
    "keep": KeepLatest(2),
    "upload": Upload("/far"),
    "export": Export(to="hf", place="/far"),
    "abandoned": "prune",
    "back_pressure": "skip",
    "arenas": 2,
    "headroom": "7 GiB",
    "staging": "overlapped",
    "reject_non_finite": True,
    "on_error": "warn",
    "on_divergence": "warn",
    "on_stale": "refuse",
    "checksum": "sha256",
    "replicas": 2,
    "verify": "full",
    "allow_pickle": True,
    "deadline_seconds": 77.5,
    "journal": False,
    "on_exception": "save",
    "init_from": "/weights",
}
MAY_DIFFER: dict[str, Any] = {
    "staging_memory": "1 GiB",
    "write_bandwidth": "3 MB/s",
    "writers": 4,
    "priority": 0,
    "storage_options": {"secret": "hunter2hunter2"},
}
OF_THE_COORDINATOR: dict[str, Any] = {"sign_manifest": signer, "verify_manifest": judge}


def between(*each: CheckpointOptions) -> str:
    return difference([given_options(options) for options in each])


def test_every_option_is_one_that_must_be_the_same_may_differ_or_is_the_coordinators():
    known = [*MUST_BE_THE_SAME, *MAY_DIFFER, *OF_THE_COORDINATOR]
    assert sorted(known) == sorted(each.name for each in fields(CheckpointOptions))


@pytest.mark.parametrize("name", MUST_BE_THE_SAME)
def test_an_option_that_must_be_the_same_is_named_with_its_values_and_ranks(name):
    stock, other = CheckpointOptions(), CheckpointOptions(**{name: MUST_BE_THE_SAME[name]})
    assert between(other, other) == ""
    for ranks in ((stock, other), (other, stock)):
        found = between(*ranks)
        assert found.startswith(f"{name} is ")
        assert found.count(" on rank ") == 2
        assert ";" not in found


@pytest.mark.parametrize("name", MAY_DIFFER)
def test_an_option_of_each_rank_may_differ_and_is_never_sent(name):
    assert given_options(CheckpointOptions(**{name: MAY_DIFFER[name]})) == {}


@pytest.mark.parametrize("name", OF_THE_COORDINATOR)
def test_what_the_coordinator_alone_uses_must_be_given_to_it(name):
    stock, given = CheckpointOptions(), CheckpointOptions(**{name: OF_THE_COORDINATOR[name]})
    assert between(given, stock) == between(given, given) == ""
    assert between(stock, given, stock) == f"{name} is None on ranks 0, 2, given on rank 1"


UPLOAD = {
    "to": "/elsewhere",
    "every": 2,
    "keep": KeepLatest(2),
    "when_busy": "wait",
    "on_preemption": "leave",
    "deadline_seconds": 9,
    "on_error": "raise",
    "bandwidth": "1 GB/s",
    "compress": "zstd",
    "storage_options": {"key": "hunter2hunter2"},
}


def test_every_option_of_an_upload_is_compared_but_bandwidth_and_storage_options():
    assert sorted(UPLOAD) == sorted(each.name for each in fields(Upload) if each.init)
    for name, value in UPLOAD.items():
        one, other = Upload("/far"), Upload(**{"to": "/far", name: value})
        found = between(CheckpointOptions(upload=one), CheckpointOptions(upload=other))
        of_many = between(CheckpointOptions(upload=[one, one]), CheckpointOptions(upload=[one, other]))
        if name in {"bandwidth", "storage_options"}:
            assert found == of_many == ""
        elif name == "to":
            assert found == "upload is /far on rank 0, /elsewhere on rank 1"
            assert of_many == "upload is /far and /far on rank 0, /far and /elsewhere on rank 1"
        else:
            assert found.startswith(f"upload.{name} is ")
            assert of_many.startswith(f"upload[1].{name} is ")


def test_uploads_in_another_order_or_number_differ():
    one, other = Upload("/one"), Upload("/other")
    assert between(CheckpointOptions(upload=[one, other]), CheckpointOptions(upload=[other, one]))
    found = between(
        CheckpointOptions(upload=one), CheckpointOptions(), CheckpointOptions(upload=[one, other])
    )
    assert found == "upload is /one on rank 0, None on rank 1, /one and /other on rank 2"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"save": EverySeconds(60)}, {"save": EverySeconds(60.0)}),
        ({"save": OnPreemption(file="/a/0")}, {"save": OnPreemption(file="/b/1")}),
        ({"save": OnPreemption()}, {"save": OnPreemption(when=lambda: False)}),
        ({"save": Optimal("1h")}, {"save": Optimal(3600)}),
        ({"verify": True}, {"verify": "read"}),
        ({"headroom": "2 GiB"}, {"headroom": 2 << 30}),
        ({"upload": Upload("/far")}, {"upload": [Upload("/far")]}),
        ({"save": None}, {}),
    ],
)
def test_two_ways_to_say_one_thing_are_the_same(one, other):
    assert between(CheckpointOptions(**one), CheckpointOptions(**other)) == ""


class Luck:
    """No value of a policy: it has an address, and a state."""

    def __init__(self) -> None:
        self.dice = Random()


class Own(SavePolicy):
    """A policy of a user, whose repr has its address."""

    def __init__(self, every: int, *, asks: bool = True, token: str = "") -> None:
        self.every, self.luck, self.token = every, Luck(), token
        self._asks, self._began = asks, Random().random()

    def decide(self, context: Any) -> str | None:
        return None

    @property
    def needs_agreement(self) -> bool:
        return self._asks


@dataclass(frozen=True)
class OwnValue(SavePolicy):
    """A policy of a user that is a value."""

    every: int
    weights: dict[str, float] = field(default_factory=lambda: {"b": 2, "a": 1})
    token: str = field(default="", repr=False)
    luck: Luck = field(default_factory=Luck)

    def decide(self, context: Any) -> str | None:
        return None


@pytest.mark.parametrize("kind", [Own, OwnValue])
def test_a_policy_of_the_users_own_is_compared_by_class_and_settings_without_secrets(
    kind: Callable[..., Any],
):
    def given(policy: SavePolicy) -> CheckpointOptions:
        return CheckpointOptions(save=policy | EverySteps(9))

    one = given(kind(3, token="hunter2hunter2"))
    assert between(one, given(kind(3, token="hunter3hunter3"))) == ""
    found = between(one, given(kind(4)))
    assert f"{kind.__name__}(every=3" in found
    assert f"{kind.__name__}(every=4" in found
    assert "hunter" not in str(given_options(one))
    assert " at 0x" not in str(given_options(one))


def test_fields_of_a_policy_are_compared_by_value_in_any_order():
    one, other = OwnValue(3), OwnValue(3, weights={"a": 1.0, "b": 2.0})
    assert between(CheckpointOptions(save=one), CheckpointOptions(save=other)) == ""
    other = OwnValue(3, weights={"a": 1.5, "b": 2.0})
    assert "'a': 1.5" in between(CheckpointOptions(save=one), CheckpointOptions(save=other))


def test_no_secret_of_a_url_is_sent():
    place = "s3://user:hunter2hunter2@bucket/run?token=hunter2hunter2"
    far = Upload(place, storage_options={"key": "hunter2hunter2"})
    options = CheckpointOptions(upload=far, storage_options={"key": "hunter2hunter2"}, sign_manifest=signer)
    assert "hunter" not in str(given_options(options))


def test_a_policy_that_asks_the_other_ranks_differs_from_one_that_does_not():
    found = between(CheckpointOptions(save=Own(3)), CheckpointOptions(save=Own(3, asks=False)))
    assert found == "save.needs_agreement is True on rank 0, False on rank 1"


def test_many_ranks_options_and_long_values_make_a_short_message():
    steps = list(range(0, 50_000, 7))
    kinds = [
        CheckpointOptions(save=None, keep=KeepBest("loss", n=1 + rank % 7), arenas=1 + (rank == 900))
        for rank in range(1000)
    ]
    found = between(*kinds)
    assert found.startswith("arenas is 1 on ranks 0, 1, 2, 3 and 995 more, 2 on rank 900; keep is KeepBest(")
    assert found.endswith(" and 3 other values")
    from ckpt_core import AtSteps

    found = between(CheckpointOptions(save=AtSteps(steps)), CheckpointOptions(save=AtSteps([*steps, 49_999])))
    assert len(found) < 500
    assert "49999" in found


class SecondRank(Solo):
    """Rank 0 of two, with what the other one was given."""

    def __init__(self, other: dict[str, str]) -> None:
        self.world_size, self.other, self.exchanges = 2, other, 0

    def gather_scatter(self, value: Any, decide: Any, *, what: str = "", deadline_seconds: Any = None) -> Any:
        self.exchanges += 1
        return decide([value, self.other])[0]


def test_options_are_compared_once_and_again_only_after_a_refusal_or_with_other_ranks():
    lead = SecondRank({"save": "EverySteps(n=2)"})
    same = SameOptions(lead, {})
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"save is None on rank 0, EverySteps\(n=2\) on rank 1"):
            same.require()
    lead.other = {}
    for _ in range(3):
        same.require()
    assert lead.exchanges == 3
    lead.world_size = 1
    alone = SameOptions(lead, {})
    alone.require()
    lead.world_size = 2
    alone.require()
    alone.require()
    assert lead.exchanges == 4


CASES: dict[str, list[dict[str, Any]]] = {
    "costs": [{"save": Optimal()}, {"save": EverySeconds(3600)}],
    "no exchange": [{"save": EverySteps(1000)}, {"save": EverySeconds(3600)}],
    "no policy": [{}, {"save": EverySeconds(3600)}],
    "keep": [{"keep": KeepLatest(1)}, {"keep": KeepLatest(2)}],
}
CALLS: dict[str, Callable[[CheckpointManager, Any], object]] = {
    "due": lambda manager, _: manager.due(1),
    "evaluation": lambda manager, _: manager.due(),
    "save": lambda manager, state: manager.save(1, state),
    "resume": lambda manager, state: manager.resume(state),
    "load": lambda manager, state: manager.load(state),
}


def refused(path: str) -> list[str]:
    rank, found = distributed.get_rank(), []
    for case, given in CASES.items():
        for call in CALLS if case == "costs" else ["due"]:
            options = CheckpointOptions(deadline_seconds=30, **given[rank])
            with CheckpointManager(Path(path, "root"), options=options) as manager:
                try:
                    CALLS[call](manager, {"w": torch.ones(3)})
                except ConfigError as error:
                    found.append(f"{case}: {error}")
    own = {"write_bandwidth": [None, "1 GB/s"][rank], "save": OnPreemption(file=f"{path}/{rank}")}
    with CheckpointManager(Path(path, "other"), **own) as manager:
        manager.due(1)
        manager.save(1, {"w": torch.ones(3)})
    return found


@pytest.mark.distributed
def test_ranks_of_different_options_are_refused_at_the_first_call_of_any_kind(tmp_path):
    first, second = run_ranks(refused, 2, str(tmp_path), timeout_seconds=120)
    assert first == second
    for message, case in zip(first, ["costs"] * len(CALLS) + list(CASES)[1:], strict=True):
        assert message.startswith(f"{case}: every rank must be given the same options, and they differ: ")
        option = "keep" if case == "keep" else "save"
        assert f" {option} is " in message
        assert "on rank 0, " in message
        assert message.endswith("on rank 1. Give all ranks the same; nothing was written")
    assert not (tmp_path / "root").exists()
    assert (tmp_path / "other" / "step-000000001" / "COMMITTED").exists()
