"""`contents="trainable"`: the frozen base is compared by checksums and never written."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from ckpt_core import CheckpointManager, ConfigError, TrainState
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.state._tensor_sums import _of_box, _wrapped, own_checksum


class Tuned(nn.Module):
    """A frozen backbone with statistics that change, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.2)).requires_grad_(
            False
        )
        self.head = nn.Linear(9, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(values))


class Packed(nn.Module):
    """A layer as quantisation leaves it: its weights are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(0, 255, (300, 300), dtype=torch.uint8))
        self.register_buffer("scales", torch.rand(300))
        self.adapter = nn.Linear(4, 4)


class Run:
    def __init__(self, *, seed: int = 0, contents: Any = "trainable", model: nn.Module | None = None) -> None:
        torch.manual_seed(seed)
        self.model = Tuned() if model is None else model
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1)
        self.state = TrainState(model=self.model, optimizer=self.optimizer, contents=contents)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.model(torch.randn(5, 6)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        return copy.deepcopy(self.model.state_dict())


def saved(root: Path, run: Run, *, step: int = 2) -> None:
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(step, run.state)


def resumed(root: Path, run: Run, **options: Any) -> None:
    with CheckpointManager(root) as checkpoints:
        checkpoints.load(run.state, **options)


def names_in(root: Path, step: int = 2) -> set[str]:
    entries = FileSystemReader(root / f"step-{step:09}").read_metadata().state_dict_metadata
    return {name.removeprefix("model.") for name in entries if name.startswith("model.")}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


TRAINED = {"head.weight", "head.bias"}
STATISTICS = {f"backbone.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


def test_what_is_trained_resumes_exactly_and_the_base_is_not_written(tmp_path):
    run = Run()
    run.step(2)
    saved(tmp_path, run)
    run.step(3)
    again = Run()
    resumed(tmp_path, again)
    again.step(3)
    assert equal(run.values(), again.values())
    assert names_in(tmp_path) == TRAINED | STATISTICS


def test_stock_dcp_reads_what_is_there(tmp_path):
    run = Run()
    run.step()
    saved(tmp_path, run)
    read = {"model": {"head": {"weight": torch.zeros(3, 9)}}}
    read = {
        "model": {name: torch.zeros_like(value) for name, value in run.values().items() if name in TRAINED}
    }
    dcp.load(read, checkpoint_id=tmp_path / "step-000000002")
    assert equal(read["model"], run.values())


def test_another_base_is_refused_before_anything_changes(tmp_path):
    saved(tmp_path, Run())
    other = Run(seed=1)
    before, generator = other.values(), torch.get_rng_state()
    with pytest.raises(
        IncompatibleCheckpointError, match=r"backbone\.0\.weight: saved float32 \[9, 6\]"
    ) as caught:
        resumed(tmp_path, other)
    assert "backbone.0.bias" in caught.value.mismatched
    assert equal(before, other.values())
    assert torch.equal(generator, torch.get_rng_state())


def test_a_base_of_another_dtype_is_refused(tmp_path):
    saved(tmp_path, Run())
    other = Run()
    other.model.backbone[0].to(torch.float64)
    with pytest.raises(IncompatibleCheckpointError, match="live float64"):
        resumed(tmp_path, other)


def test_another_base_loads_if_not_everything_must_fit(tmp_path, caplog):
    run = Run()
    run.step()
    saved(tmp_path, run)
    other = Run(seed=1)
    base = other.model.backbone[0].weight.clone()
    resumed(tmp_path, other, strict=False)
    assert torch.equal(other.model.head.weight, run.model.head.weight)
    assert torch.equal(other.model.backbone[0].weight, base)
    assert "live is a base without a name" in caplog.text


def test_a_frozen_tensor_that_is_changed_is_saved_from_then_on(tmp_path, caplog):
    run = Run()
    saved(tmp_path, run)
    with torch.no_grad():
        run.model.backbone[0].bias.add_(1)
    saved(tmp_path, run, step=3)
    assert names_in(tmp_path, 3) == TRAINED | STATISTICS | {"backbone.0.bias"}
    assert "were changed in place" in caplog.text
    again = Run()
    resumed(tmp_path, again)
    assert equal(run.values(), again.values())
    saved(tmp_path, again, step=4)
    assert names_in(tmp_path, 4) == names_in(tmp_path, 3), "the next resume begins with the base, too"


def test_a_cast_between_saves_is_a_change_though_it_counts_no_version(tmp_path, caplog):
    run = Run()
    saved(tmp_path, run)
    before = [each.data for each in run.model.backbone[0].parameters()]  # or its memory might be used again
    run.model.backbone[0].bfloat16().float()
    saved(tmp_path, run, step=3)
    assert before[0].data_ptr() != run.model.backbone[0].weight.data_ptr()
    assert names_in(tmp_path, 3) == TRAINED | STATISTICS | {"backbone.0.weight", "backbone.0.bias"}
    assert "were changed in place" in caplog.text


def test_adapters_that_are_merged_at_a_save_are_in_it(tmp_path, caplog):
    peft = pytest.importorskip("peft")

    def adapted() -> Run:
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
        return Run(model=peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"])))

    run = adapted()
    run.step(2)
    saved(tmp_path, run)
    run.model.merge_adapter()
    saved(tmp_path, run, step=3)
    assert "were changed in place" in caplog.text
    again = adapted()
    resumed(tmp_path, again)
    assert equal(run.values(), again.values())


def test_a_change_before_the_first_save_is_seen(tmp_path):
    run = Run()
    with torch.no_grad():
        run.model.backbone[0].bias.add_(1)
    saved(tmp_path, run)
    again = Run()
    resumed(tmp_path, again)
    assert equal(run.values(), again.values())


def test_a_touch_that_changes_nothing_is_no_change(tmp_path, caplog):
    run = Run()
    saved(tmp_path, run)
    with torch.no_grad():
        run.model.backbone[0].bias.mul_(1)
    saved(tmp_path, run, step=3)
    assert names_in(tmp_path, 3) == TRAINED | STATISTICS
    assert "changed" not in caplog.text


def test_a_parameter_unfrozen_since_begins_with_the_base(tmp_path, caplog):
    model = Tuned()
    run = Run(model=model)
    run.optimizer.add_param_group({"params": [model.backbone[0].weight]})
    base = model.backbone[0].weight.clone()
    run.step()
    saved(tmp_path, run)
    model.backbone[0].weight.requires_grad_(True)
    resumed(tmp_path, run)
    assert torch.equal(model.backbone[0].weight, base)
    assert "begin with the values of the base: backbone.0.weight" in caplog.text
    run.step()
    saved(tmp_path, run, step=3)
    assert "backbone.0.weight" in names_in(tmp_path, 3)


def test_a_parameter_frozen_since_is_loaded_and_stays_saved(tmp_path):
    run = Run()
    run.step()
    saved(tmp_path, run)
    again = Run()
    again.model.head.bias.requires_grad_(False)
    resumed(tmp_path, again)
    assert equal(run.values(), again.values())
    saved(tmp_path, again, step=3)
    assert "head.bias" in names_in(tmp_path, 3)


def test_a_whole_checkpoint_resumes_with_the_option_and_the_other_way_round(tmp_path):
    run = Run(contents="all")
    run.step()
    saved(tmp_path, run)
    small = Run()
    resumed(tmp_path, small)
    saved(tmp_path, small, step=3)
    assert names_in(tmp_path, 3) == TRAINED | STATISTICS
    whole = Run(contents="all")
    resumed(tmp_path, whole)
    assert equal(run.values(), whole.values())
    saved(tmp_path, whole, step=4)
    assert "backbone.0.weight" in names_in(tmp_path, 4)


def test_one_item_alone_is_compared_as_well(tmp_path):
    saved(tmp_path, Run())
    resumed(tmp_path, Run(), items=["model"])
    with pytest.raises(IncompatibleCheckpointError, match="another base"):
        resumed(tmp_path, Run(seed=1), items=["model"])


def test_packed_weights_in_buffers_belong_to_the_base(tmp_path):
    run = Run(model=nn.Sequential(Packed()))
    saved(tmp_path, run)
    assert names_in(tmp_path) == {"0.adapter.weight", "0.adapter.bias"}


def test_several_models_have_one_base(tmp_path):
    def pair() -> TrainState:
        torch.manual_seed(0)
        models = {"teacher": Tuned().requires_grad_(False), "student": Tuned()}
        optimizer = torch.optim.AdamW(models["student"].head.parameters())
        return TrainState(model=models, optimizer=optimizer, contents="trainable")

    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(2, pair())
        assert checkpoints.resume(pair()) == 2
    assert {f"student.{name}" for name in TRAINED} <= names_in(tmp_path)
    assert "teacher.head.weight" not in names_in(tmp_path)


def test_adapters_make_it_the_default_which_is_said_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = Run(contents=None)
    saved(tmp_path, run)
    assert "backbone.0.weight" in names_in(tmp_path), "no adapters"
    model = Tuned()
    model.peft_config = {"default": type("Config", (), {"base_model_name_or_path": "some/base"})}
    adapted = Run(model=model, contents=None)
    caplog.clear()
    saved(tmp_path / "adapted", adapted)
    saved(tmp_path / "adapted", adapted, step=3)
    assert names_in(tmp_path / "adapted") == TRAINED | STATISTICS
    assert caplog.text.count("the default for PEFT models") == 1
    assert "some/base" in caplog.text
    whole = Run(model=model, contents="all")
    saved(tmp_path / "whole", whole)
    assert "backbone.0.weight" in names_in(tmp_path / "whole")


def test_an_unknown_value_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="contents"):
        Run(contents="adapters")


DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.complex128, torch.bool]


def test_a_checksum_is_that_of_its_shards_however_cut():
    torch.manual_seed(0)
    for dtype in DTYPES:
        for shape in [(70, 31), (13, 7, 5), (9001,), (70_000, 3), (1,)]:
            whole = (torch.randn(shape) * 100).to(dtype)
            expected = own_checksum(whole)
            for dim in range(whole.dim()):
                start, total = 0, 0
                for part in whole.tensor_split(4, dim):
                    offsets = [0] * whole.dim()
                    offsets[dim] = start
                    start += part.shape[dim]
                    total += _of_box(part, offsets, shape)
                assert _wrapped(total) == expected, (dtype, shape, dim)


def test_a_checksum_depends_on_every_bit_and_its_place():
    torch.manual_seed(0)
    values = torch.randint(0, 255, (3000,), dtype=torch.uint8)
    whole = own_checksum(values)
    for _ in range(200):
        at, bit = int(torch.randint(3000, ())), int(torch.randint(8, ()))
        flipped = values.clone()
        flipped[at] ^= 1 << bit
        swapped = values.clone()
        other = (at + 1 + int(torch.randint(2999, ()))) % 3000
        swapped[at], swapped[other] = values[other], values[at]
        assert own_checksum(flipped) != whole
        assert own_checksum(swapped) != whole or values[at] == values[other]
    assert own_checksum(torch.zeros(4, 6)) == own_checksum(torch.zeros(5, 5))  # shapes are compared apart
