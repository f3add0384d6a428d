"""Accelerate: what users of `enable` may rely on."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from torch import nn

import accelerate_ckpt
from accelerate_ckpt._checkpoints import enable_implicitly
from ckpt_core import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    EverySteps,
    EveryTokens,
    IncompatibleCheckpointError,
    KeepBest,
    KeepLatest,
    SaveError,
)
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.adapters.accelerate_jobs import (
    Job,
    accelerator,
    committed,
    enable,
    forget_accelerators,
    prepare,
    prepared,
    step,
    train,
    weights,
)

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

JOB = Job(strategy="single", world=1)


def test_a_checkpoint_has_the_stock_layout_and_a_commit_marker(tmp_path: Path) -> None:
    made, *rest = prepared(JOB.but(root=str(tmp_path)), stock_files=True)
    step(made, *rest)
    assert made.save_state() == tmp_path / "checkpoint_0"
    made.end_training()
    found = {path.name for path in (tmp_path / "checkpoint_0").iterdir()}
    assert found >= {
        "pytorch_model_fsdp_0", "optimizer_0", "model.safetensors", "optimizer.bin", "scheduler.bin",
        "random_states_0.pkl", "manifest.json", "COMMITTED",
    }  # fmt: skip


def test_stock_accelerate_loads_what_we_saved(tmp_path: Path) -> None:
    made, net, optimizer, *_rest = prepared(JOB.but(root=str(tmp_path)), stock_files=True)
    step(made, net, optimizer)
    made.save_state()
    saved, moments = weights(net), optimizer.state_dict()["state"][0]["exp_avg"].clone()
    step(made, net, optimizer)
    accelerate_ckpt.disable(made)
    made.load_state(str(tmp_path / "checkpoint_0"))
    assert weights(net) == saved
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moments)


def test_we_load_what_stock_accelerate_saved(tmp_path: Path) -> None:
    made, net, optimizer, *_rest = prepared(JOB.but(root=str(tmp_path), enabled=False))
    step(made, net, optimizer)
    step(made, net, optimizer)
    made.save_state(str(tmp_path / "checkpoint_4"))
    saved = weights(net)
    step(made, net, optimizer)
    accelerate_ckpt.enable(made, tmp_path)
    made.load_state(str(tmp_path / "checkpoint_4"))
    assert weights(net) == saved
    assert accelerate_ckpt.checkpoints(made).step == 2
    step(made, net, optimizer)
    made.load_state()
    assert weights(net) == saved, "without a directory, and nothing of ours: the newest of stock"
    assert made.save_iteration == 5
    made.end_training()


def test_unless_stock_files_are_asked_for_only_shards_are_written(tmp_path: Path) -> None:
    made, net, optimizer, *_rest = prepared(JOB.but(root=str(tmp_path)))
    step(made, net, optimizer)
    made.save_state()
    saved = weights(net)
    step(made, net, optimizer)
    made.load_state(str(tmp_path / "checkpoint_0"))
    assert weights(net) == saved
    assert not list((tmp_path / "checkpoint_0").glob("*model*.safetensors"))
    made.end_training()
    merge_fsdp_weights(str(tmp_path / "checkpoint_0" / "pytorch_model_fsdp_0"), str(tmp_path))
    merged = load_file(tmp_path / "model.safetensors")
    assert [value for name, _ in net.named_parameters() for value in merged[name].flatten().tolist()] == saved


def test_a_restart_continues_the_numbering_and_stray_entries_do_no_harm(tmp_path: Path) -> None:
    job = JOB.but(root=str(tmp_path), automatic=True, total_limit=2)
    root = tmp_path / "checkpoints"
    for of_run in (["checkpoint_0", "checkpoint_1"], ["checkpoint_2", "checkpoint_3"]):
        made, *rest = prepared(job)
        (root / ".ipynb_checkpoints").mkdir(parents=True, exist_ok=True)
        (root / "best").mkdir(parents=True, exist_ok=True)
        for name in of_run:
            step(made, *rest)
            assert made.save_state() == root / name
        made.end_training()
        assert committed(root) == of_run
        forget_accelerators()


def test_going_back_to_an_older_checkpoint_makes_what_follows_the_newest(tmp_path: Path) -> None:
    made, *rest = prepared(JOB.but(root=str(tmp_path)), keep=KeepLatest(2))
    for _ in range(2):
        step(made, *rest)
        step(made, *rest)
        made.save_state()
    made.load_state(str(tmp_path / "checkpoint_0"))
    step(made, *rest)
    assert made.save_state() == tmp_path / "checkpoint_2"
    made.load_state()
    assert accelerate_ckpt.checkpoints(made).step == 3
    manager = accelerate_ckpt.checkpoints(made).manager
    assert [info.name for info in manager.checkpoints()] == ["checkpoint_0", "checkpoint_2"]
    assert committed(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"], "an abandoned one stays"
    made.end_training()


def test_loading_without_a_directory_passes_over_a_damaged_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, net, optimizer, *_rest = prepared(JOB.but(root=str(tmp_path)))
    step(made, net, optimizer)
    made.save_state()
    saved = weights(net)
    step(made, net, optimizer)
    made.save_state()
    accelerate_ckpt.checkpoints(made).wait()
    damaged = next((tmp_path / "checkpoint_1" / "pytorch_model_fsdp_0").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    made.load_state()
    assert weights(net) == saved
    assert accelerate_ckpt.checkpoints(made).step == 1
    assert "checkpoint_1" in caplog.text
    with pytest.raises(CorruptCheckpointError):
        made.load_state(str(tmp_path / "checkpoint_1"))
    made.end_training()


def test_a_torn_checkpoint_is_refused_and_a_missing_one_is_not_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, net, *rest = prepared(JOB.but(root=str(tmp_path)))
    step(made, net, *rest)
    made.save_state()
    accelerate_ckpt.checkpoints(made).wait()
    before = weights(net)
    (tmp_path / "checkpoint_0" / "COMMITTED").unlink()
    with pytest.raises(CorruptCheckpointError, match="never committed"):
        made.load_state(str(tmp_path / "checkpoint_0"))
    with pytest.raises(CheckpointNotFoundError):
        made.load_state(str(tmp_path / "checkpoint_7"))
    made.load_state()
    assert "checkpoint_0: interrupted" in caplog.text, (
        "starting afresh is not silent where there is something"
    )
    assert weights(net) == before
    made.end_training()


def test_the_save_policy_decides_which_calls_save_and_counts_optimizer_steps(tmp_path: Path) -> None:
    job = JOB.but(root=str(tmp_path), accumulation=2)
    made, net, optimizer, *_rest = prepared(job, save=EverySteps(2))
    for micro_batch in range(8):
        with made.accumulate(net):
            step(made, net, optimizer)
        due = micro_batch in {3, 7}
        saved = made.save_state(str(tmp_path / f"after-{micro_batch}"))
        assert (saved is not None) is due
    attached = accelerate_ckpt.checkpoints(made)
    assert attached.step == 4
    handle = attached.save(str(tmp_path / "final"))
    assert handle is not None
    assert handle.result().step == 4
    made.end_training()
    assert committed(tmp_path) == ["after-3", "after-7", "final"]


def test_saving_within_an_accumulation_window_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, net, *rest = prepared(JOB.but(root=str(tmp_path), accumulation=4))
    with made.accumulate(net):
        step(made, net, *rest)
    made.save_state()
    made.end_training()
    assert "within an accumulation window" in caplog.text


def test_a_loader_that_was_not_prepared_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = JOB.but(root=str(tmp_path))
    made = accelerator(job)
    enable(job, made)
    net = torch.nn.Linear(2, 1)
    made.prepare(net, torch.optim.SGD(net.parameters()))
    for _ in torch.utils.data.DataLoader([torch.ones(2)] * 4):
        made.save_state()
    made.end_training()
    assert caplog.text.count("If it trains, give it to accelerator.prepare(...)") == 1


def test_logged_metrics_decide_what_is_kept(tmp_path: Path) -> None:
    made, *rest = prepared(JOB.but(root=str(tmp_path)), keep=KeepLatest(1) | KeepBest("loss", mode="min"))
    for loss in (3.0, 1.0, 2.0, torch.tensor(4.0)):
        step(made, *rest)
        made.log({"loss": loss, "note": "text"})
        made.save_state()
    made.end_training()
    assert committed(tmp_path) == ["checkpoint_1", "checkpoint_3"]


def test_a_full_disk_in_the_second_save_loses_nothing_with_a_limit_of_one(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    storage = FaultyStorage(
        LocalStorage(tmp_path / "checkpoints"), [Fault(method="create", key="*checkpoint_1*", error=full)]
    )
    job = JOB.but(root=str(tmp_path), automatic=True, total_limit=1)
    made = accelerator(job)
    accelerate_ckpt.enable(made, storage)
    net, optimizer, *_rest = prepare(job, made)
    step(made, net, optimizer)
    made.save_state()
    saved = weights(net)
    step(made, net, optimizer)
    made.save_state()
    with pytest.raises(SaveError, match="No space left"):
        accelerate_ckpt.checkpoints(made).wait()
    assert committed(tmp_path / "checkpoints") == ["checkpoint_0"]
    made.load_state()
    assert weights(net) == saved
    made.end_training()


def test_hooks_take_models_over_as_in_stock(tmp_path: Path) -> None:
    made, net, *rest = prepared(JOB.but(root=str(tmp_path)))
    seen: list[tuple[int, int]] = []

    def save_adapter(models: list[nn.Module], states: list[Any], output_dir: str) -> None:
        seen.append((len(models), len(states)))
        (Path(output_dir) / "adapter").mkdir()
        torch.save(models[0].state_dict(), Path(output_dir) / "adapter" / "lora.bin")
        states.pop()

    def load_adapter(models: list[nn.Module], input_dir: str) -> None:
        models.pop().load_state_dict(torch.load(Path(input_dir) / "adapter" / "lora.bin"))

    made.register_save_state_pre_hook(save_adapter)
    made.register_load_state_pre_hook(load_adapter)
    step(made, net, *rest)
    made.save_state()
    saved = weights(net)
    step(made, net, *rest)
    made.load_state(str(tmp_path / "checkpoint_0"))
    assert weights(net) == saved
    assert seen == [(1, 1)]
    inside = {path.name for path in (tmp_path / "checkpoint_0").iterdir()}
    assert "adapter" in inside
    assert not inside & {"pytorch_model_fsdp_0", "model.safetensors"}
    made.end_training()


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_registered_objects_and_several_models_under_one_optimizer_come_back(tmp_path: Path) -> None:
    made = accelerator(JOB.but(root=str(tmp_path)))
    accelerate_ckpt.enable(made, tmp_path)
    one, two = nn.Linear(8, 8), nn.BatchNorm1d(8)
    both = torch.optim.AdamW([*one.parameters(), *two.parameters()])
    alone = torch.optim.SGD(one.parameters(), momentum=0.9)
    one, two, both, alone = made.prepare(one, two, both, alone)
    counter = Counter()
    made.register_for_checkpointing(counter)

    def train_once() -> None:
        counter.value += 1
        made.backward(two(one(torch.randn(4, 8))).pow(2).mean())
        both.step()
        alone.step()

    train_once()
    made.save_state()
    saved = weights(one) + weights(two) + two.running_mean.tolist()
    momentum = alone.optimizer.state[one.weight]["momentum_buffer"].clone()
    train_once()
    made.load_state(str(tmp_path / "checkpoint_0"))
    assert weights(one) + weights(two) + two.running_mean.tolist() == saved
    assert torch.equal(alone.optimizer.state[one.weight]["momentum_buffer"], momentum)
    assert counter.value == 1
    made.end_training()


def test_another_number_of_models_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    made, _net, *_rest = prepared(JOB.but(root=str(tmp_path)))
    made.save_state()
    made.prepare(nn.Linear(2, 2))
    with pytest.raises(IncompatibleCheckpointError, match="saved with 1 models, and 2 are prepared"):
        made.load_state()
    made.end_training()


def test_the_same_directory_can_be_saved_to_again(tmp_path: Path) -> None:
    made, net, *rest = prepared(JOB.but(root=str(tmp_path)))
    (tmp_path / "last").mkdir()  # as scripts do
    for _ in range(2):
        step(made, net, *rest)
        made.save_state(str(tmp_path / "last"))
    saved = weights(net)
    step(made, net, *rest)
    made.load_state(str(tmp_path / "last"))
    assert weights(net) == saved
    assert accelerate_ckpt.checkpoints(made).step == 2
    made.end_training()


def test_checkpoints_live_on_object_storage_too(tmp_path: Path) -> None:
    job = JOB.but(root=str(tmp_path), enabled=False)
    made = accelerator(job)
    accelerate_ckpt.enable(made, "memory://run")
    net, *rest = prepare(job, made)
    loaded_from: list[str] = []
    made.register_save_state_pre_hook(
        lambda _models, _states, output_dir: (Path(output_dir) / "note.txt").write_text("hello")
    )
    made.register_load_state_pre_hook(
        lambda _models, input_dir: loaded_from.append((Path(input_dir) / "note.txt").read_text())
    )
    step(made, net, *rest)
    assert made.save_state() == "memory://run/checkpoint_0"
    saved = weights(net)
    step(made, net, *rest)
    made.load_state("memory://run/checkpoint_0")
    assert weights(net) == saved
    assert loaded_from == ["hello"]
    made.end_training()


def test_disable_puts_everything_back_and_enable_twice_is_an_error(tmp_path: Path) -> None:
    made, *_rest = prepared(JOB.but(root=str(tmp_path)))
    with pytest.raises(ConfigError, match="enabled already"):
        accelerate_ckpt.enable(made, tmp_path)
    accelerate_ckpt.disable(made)
    own = type(made)
    for name in (
        "save_state",
        "load_state",
        "end_training",
        "log",
        "prepare_optimizer",
        "skip_first_batches",
    ):
        assert getattr(made, name).__func__ is getattr(own, name)
    loader = made._dataloaders[0]
    assert not {"begin", "end", "_update_state_dict"} & set(loader.__dict__)
    with pytest.raises(ConfigError, match="not enabled"):
        accelerate_ckpt.checkpoints(made)
    accelerate_ckpt.enable(made, tmp_path)
    made.end_training()


def test_a_script_gives_the_counts_that_save_state_does_not_know_and_they_go_on(tmp_path: Path) -> None:
    saved = []
    for first, last in ((1, 4), (4, 9)):
        forget_accelerators()
        made, *rest = prepared(JOB.but(root=str(tmp_path)), save=EveryTokens(100))
        made.load_state()
        attached = accelerate_ckpt.checkpoints(made)
        with pytest.raises(ConfigError, match=r"number of tokens, .*maybe_save\(tokens=…\)"):
            made.save_state()
        for number in range(first, last):
            step(made, *rest)
            saved += [number] if attached.maybe_save(tokens=number * 40) else []
        made.end_training()
    assert saved == [3, 5, 8]


def test_enable_takes_the_place_of_what_the_runner_did(tmp_path: Path) -> None:
    made = accelerator(JOB.but(root=str(tmp_path)))
    enable_implicitly(made)
    accelerate_ckpt.enable(made, tmp_path, save=EverySteps(3))
    assert accelerate_ckpt.checkpoints(made).manager.options.save == EverySteps(3)
    made.end_training()


def test_engines_that_hide_their_shards_keep_their_own_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from accelerate.utils import DistributedType

    made = accelerator(JOB.but(root=str(tmp_path)))
    made.state.distributed_type = DistributedType.DEEPSPEED
    with caplog.at_level(logging.WARNING):
        accelerate_ckpt.enable(made, tmp_path)
    assert "DEEPSPEED" in caplog.text
    assert "save_state" not in made.__dict__


def test_save_state_without_a_place_to_save_to_says_what_to_do() -> None:
    made = accelerator(JOB.but(root=""))
    accelerate_ckpt.enable(made)
    with pytest.raises(ConfigError, match="output_dir"):
        made.save_state()
    made.end_training()


@pytest.mark.slow
def test_copies_that_overlap_with_training_are_of_the_step_that_was_saved(tmp_path: Path) -> None:
    job = JOB.but(root=str(tmp_path), save_at=(3, 4, 5))
    whole = train(job, staging="overlapped")
    for at in job.save_at:
        forget_accelerators()
        assert train(job.but(save_at=(), load=f"{tmp_path}/checkpoint_{at}"))["trace"] == whole["trace"][at:]
