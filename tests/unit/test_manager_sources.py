"""`load(source=...)` takes what others wrote, wherever it is, and touches nothing unless all of it fits."""

from __future__ import annotations

import json
import shutil
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)


class Tied(nn.Module):
    """A language model in small: the head is the embedding."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def state(model: nn.Module) -> dict[str, Any]:
    return {name: each.clone() for name, each in model.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def checkpoints(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        yield manager


@pytest.fixture
def weights(tmp_path):
    """A folder without the tied head, as transformers writes it; and what is in it."""
    values = state(Tied())
    del values["head.weight"]
    (tmp_path / "hf").mkdir()
    save_file(values, tmp_path / "hf" / "model.safetensors")
    return tmp_path / "hf", values


@pytest.mark.parametrize(
    "wrap", [lambda m: TrainState(model=m), lambda m: {"model": m}, lambda m: {"model": m.state_dict()}]
)
def test_a_tied_weight_is_not_missing(checkpoints, weights, wrap):
    live = Tied()
    found = checkpoints.load(wrap(live), source=weights[0], items=["model"])
    assert same(state(live), {**weights[1], "head.weight": weights[1]["embed.weight"]})
    assert (found.missing, found.unexpected, found.step) == ([], [], None)
    untied = Tied(tied=False)
    before = state(untied)
    with pytest.raises(IncompatibleCheckpointError) as error:
        checkpoints.load(wrap(untied), source=weights[0], items=["model"])
    assert error.value.missing == ("model.head.weight",)
    assert same(state(untied), before)


def test_names_and_dtypes_are_fitted_as_those_of_a_checkpoint(checkpoints, weights):
    folder, values = weights
    outer = nn.ModuleDict({"net": nn.ModuleDict({"lm": Tied().bfloat16()})})
    checkpoints.load(
        TrainState(model=outer), source=str(folder), items=["model"], rename={"": "net.lm"}, cast=True
    )
    assert torch.equal(outer["net"]["lm"].embed.weight, values["embed.weight"].bfloat16())
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = checkpoints.load(
        TrainState(model=inner),
        source=folder / "model.safetensors",
        items=["model"],
        rename={"body": ""},
        strict=False,
    )
    assert torch.equal(inner[0].weight, values["body.0.weight"])
    assert (found.matched, found.missing, found.unexpected) == (7, [], ["model.embed.weight"])
    with pytest.raises(ConfigError, match="two entries of the checkpoint"):
        checkpoints.load(TrainState(model=inner), source=folder, rename={"body.0": "", "embed": ""})
    picked = Tied()
    checkpoints.load(TrainState(model=picked), source=folder, items=["model"], include=["model.body.*"])
    assert torch.equal(picked.body[0].weight, values["body.0.weight"])
    assert not torch.equal(picked.embed.weight, values["embed.weight"])


def test_checkpoints_of_other_roots_and_of_stock_are_places_too(checkpoints, tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path / "other") as other:
        for step in (4, 5):
            other.save(step, TrainState(model=model, optimizer=optimizer))
            other.wait()
            saved = model.weight.detach().clone()
            model.weight.data += 1
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "stock" / "it")
    newest, five = nn.Linear(3, 2), tmp_path / "other" / "step-000000005"
    live = TrainState(model=newest, optimizer=torch.optim.AdamW(newest.parameters()))
    for place in (tmp_path / "other", five, f"file://{five}"):
        assert checkpoints.load(live, source=place).step == 5
        assert torch.equal(newest.weight, saved)
    checkpoints.load(live, source=tmp_path / "stock" / "it", items=["model"])
    assert torch.equal(newest.weight, model.weight)
    checkpoints.save(1, live)
    checkpoints.wait()
    (info,) = checkpoints.checkpoints()
    manifest = json.loads((tmp_path / "run" / info.name / "manifest.json").read_text())
    assert (manifest["lineage"]["ancestry"], "parent" in manifest["provenance"]) == ([], False)


def test_what_was_never_committed_is_no_source(checkpoints, tmp_path):
    live = {"w": torch.zeros(2)}
    with CheckpointManager(tmp_path / "other") as other:
        other.save(1, {"w": torch.ones(2)})
    torn = tmp_path / "other" / "step-000000001"
    (torn / "COMMITTED").unlink()
    hidden = shutil.copytree(torn, tmp_path / "other" / ".incomplete-1-step-000000002")
    for place in (torn, hidden):
        with pytest.raises(CheckpointNotFoundError, match="never committed"):
            checkpoints.load(live, source=place)
    assert live["w"].tolist() == [0, 0]


def test_a_source_that_is_damaged_or_missing_touches_nothing(checkpoints, weights, tmp_path):
    live, folder = Tied(), weights[0]
    before, file = state(live), folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CorruptCheckpointError, match="the file at"):
        checkpoints.load(TrainState(model=live), source=folder)
    with pytest.raises(CheckpointNotFoundError, match="there is nothing"):
        checkpoints.load(TrainState(model=live), source=tmp_path / "elsewhere")
    assert same(state(live), before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": 1}, "neither step= nor name="),
        ({"name": "x"}, "neither step= nor name="),
        ({"source": 3}, "source must be a path or URL"),
        ({"source": ""}, "source must be a path or URL"),
        ({"storage_options": {"key": "x"}}, "apply to URLs only"),
    ],
)
def test_wrong_arguments_are_named(checkpoints, weights, arguments, words):
    with pytest.raises(ConfigError, match=words):
        checkpoints.load(TrainState(model=Tied()), **{"source": weights[0], **arguments})


def test_who_judges_manifests_loads_nothing_without_one(weights, tmp_path):
    with (
        CheckpointManager(tmp_path / "judged", verify_manifest=lambda *_: True) as manager,
        pytest.raises(UntrustedCheckpointError, match="no manifest"),
    ):
        manager.load(TrainState(model=Tied()), source=weights[0], items=["model"])


def test_places_in_a_bucket_are_read_by_urls(checkpoints, weights):
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/sources/hf/model.safetensors", (weights[0] / "model.safetensors").read_bytes())
    for place in ("memory://sources/hf", "memory://sources/hf/", "memory://sources/hf/model.safetensors"):
        live = Tied()
        checkpoints.load(TrainState(model=live), source=place, items=["model"])
        assert torch.equal(live.body[0].weight, weights[1]["body.0.weight"])
    with pytest.raises(CheckpointNotFoundError, match="there is nothing"):
        checkpoints.load(TrainState(model=Tied()), source="memory://sources/none", items=["model"])


def test_an_adapter_goes_into_a_live_peft_model_and_leaves_the_base_alone(checkpoints, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["body.0"], init_lora_weights=False)
    theirs = peft.get_peft_model(Tied(), config)
    theirs.save_pretrained(tmp_path / "adapter")
    live = peft.get_peft_model(Tied(), config)
    before = {name: value for name, value in state(live).items() if "lora_" not in name}
    found = checkpoints.load(TrainState(model=live), source=tmp_path / "adapter", items=["model"])
    after, wanted = state(live), state(theirs)
    assert (found.matched, found.missing, found.unexpected) == (2, [], [])
    assert all(torch.equal(after[name], wanted[name]) for name in wanted if "lora_" in name)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    checkpoints.save(1, TrainState(model=live))
    checkpoints.wait()
    again = peft.get_peft_model(Tied(), config)
    again.load_state_dict(after)
    checkpoints.resume(TrainState(model=again))
    assert same(state(again), after)
