"""Training jobs under Accelerate for tests: module level, because ranks are spawned processes."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import accelerate_ckpt
from accelerate_ckpt._checkpoints import enable_implicitly
from ckpt_core import DeadlineError

STEPS_PER_EPOCH = 6
_SAMPLES = 48
_WIDTH = 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run."""

    strategy: str = "ddp"
    root: str = ""
    steps: int = 14
    save_at: tuple[int, ...] = ()
    load: str | None = None
    resume: bool = False
    data: str = "skip"
    seedable: bool = False
    dropout: float = 0.1
    accumulation: int = 1
    automatic: bool = False
    total_limit: int | None = None
    enabled: bool = True
    stock_save_to: str | None = None
    stock_files: bool = False
    world: int = 2

    def but(self, **changes: Any) -> Job:
        return replace(self, **changes)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(_WIDTH, dtype=torch.float32) * (index + 1))


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = Samples()
        return iter([samples[index] for index in range(_SAMPLES)])


def model(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    # The last bias has one element: fewer than there are ranks.
    return nn.Sequential(
        nn.Linear(_WIDTH, 16), nn.LayerNorm(16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 1)
    )


def accelerator(job: Job) -> Any:
    """An accelerator on the CPU; accelerate itself never selects FSDP there."""
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_TORCH_DEVICE="cpu")
    from accelerate import Accelerator, PartialState
    from accelerate.utils import (
        DataLoaderConfiguration,
        DistributedType,
        FullyShardedDataParallelPlugin,
        ProjectConfiguration,
    )

    made = Accelerator(
        cpu=True,
        gradient_accumulation_steps=job.accumulation,
        project_config=ProjectConfiguration(
            project_dir=job.root, automatic_checkpoint_naming=job.automatic, total_limit=job.total_limit
        ),
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=job.seedable,
            use_stateful_dataloader=job.data == "stateful",
            dispatch_batches=False,
        ),
    )
    if job.strategy in {"fsdp1", "fsdp2"}:
        fsdp2 = job.strategy == "fsdp2"
        made.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2 if fsdp2 else 1,
            reshard_after_forward=True if fsdp2 else "FULL_SHARD",
            state_dict_type="SHARDED_STATE_DICT",
            use_orig_params=None if fsdp2 else True,
            sync_module_states=None if fsdp2 else False,
        )
        made.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return made


def loader(job: Job) -> Any:
    batch = _SAMPLES // STEPS_PER_EPOCH // job.world
    dataset: Any = Stream() if job.data == "iterable" else Samples()
    shuffle = None if job.data == "iterable" else True
    return torch.utils.data.DataLoader(dataset, batch_size=batch, shuffle=shuffle)


def prepare(job: Job, made: Any) -> tuple[Any, ...]:
    net = model(job.dropout)
    if job.strategy == "tp":
        return _prepare_tensor_parallel(job, made, net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    return made.prepare(net, optimizer, scheduler, loader(job))


def _prepare_tensor_parallel(job: Job, made: Any, net: nn.Module) -> tuple[Any, ...]:
    from torch.distributed import device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = device_mesh.init_device_mesh("cpu", (job.world,))
    parallelize_module(
        net,
        mesh,
        {"0": ColwiseParallel(output_layouts=Replicate()), "4": RowwiseParallel(input_layouts=Replicate())},
    )
    # Accelerate refuses its own tensor parallelism on the CPU, and DDP around DTensors fails.
    net = made.prepare_model(net, evaluation_mode=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    return net, *made.prepare(optimizer, scheduler, loader(job))


def full_state(net: nn.Module, optimizer: Any) -> dict[str, list[float]]:
    """Every parameter and moment, gathered, so that strategies can be compared."""
    from ckpt_core.state import model_state, optimizer_state

    tree = {"model": model_state(net), "optimizer": optimizer_state(net, optimizer)["state"]}
    found: dict[str, list[float]] = {}
    for name, value in tree["model"].items():
        found[name] = _whole(value)
    for name, of_parameter in sorted(tree["optimizer"].items()):
        for key, value in of_parameter.items():
            found[f"{name}.{key}"] = _whole(value)
    return found


def _whole(value: Any) -> list[float]:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    if isinstance(value, DTensor):
        value = value.full_tensor()
    elif isinstance(value, ShardedTensor):
        out = torch.zeros(value.size())
        value.gather(0, out if torch.distributed.get_rank() == 0 else None)
        torch.distributed.broadcast(out, 0)
        value = out
    return torch.as_tensor(value).detach().flatten().tolist()


def enable(job: Job, made: Any, **options: Any) -> Any:
    if job.stock_files:
        options = {"stock_files": True, **options}
    return (
        accelerate_ckpt.enable(made, None if job.automatic else job.root, **options) if job.enabled else made
    )


def prepared(job: Job, **options: Any) -> tuple[Any, ...]:
    """An enabled accelerator, and what it has prepared."""
    made = accelerator(job)
    enable(job, made, **options)
    return made, *prepare(job, made)


def step(made: Any, net: nn.Module, optimizer: Any, *_: Any) -> None:
    """One optimizer step."""
    made.backward(net(torch.ones(2, _WIDTH)).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()


def weights(net: nn.Module) -> list[float]:
    return [value for parameter in net.parameters() for value in parameter.flatten().tolist()]


def train(job: Job, **options: Any) -> dict[str, Any]:
    """Train, save where told, and tell what every step saw and computed."""
    made = accelerator(job)
    tensor_parallel = job.strategy == "tp"
    torch.manual_seed(1 if tensor_parallel else 1 + made.process_index)
    enable(job, made, **options)
    net, optimizer, scheduler, batches = prepare(job, made)
    if job.load is not None or job.resume:
        made.load_state(job.load)
    trace = list(_steps(job, made, (net, optimizer, scheduler, batches)))
    if job.stock_save_to is not None:
        made.save_state(job.stock_save_to)
    state = full_state(net, optimizer)
    made.end_training()
    return {"trace": trace, "state": state, "step": made.step, "iteration": made.save_iteration}


def load_only(job: Job) -> dict[str, Any]:
    """Load, and tell what is there then."""
    made = accelerator(job)
    enable(job, made)
    net, optimizer, scheduler, _ = prepare(job, made)
    made.load_state(job.load)
    found = {
        "state": full_state(net, optimizer),
        "rate": scheduler.get_last_lr(),
        "step": made.step,
        "done": accelerate_ckpt.checkpoints(made).step if job.enabled else None,
    }
    made.end_training()
    return found


def _steps(job: Job, made: Any, prepared: tuple[Any, ...]) -> Iterator[tuple[int, float, float]]:
    net, optimizer, scheduler, batches = prepared
    done = _batches_done(job, made)
    first_epoch, within = divmod(done, STEPS_PER_EPOCH)
    for epoch in range(first_epoch, 1 + job.steps // STEPS_PER_EPOCH):
        active = batches
        if epoch == first_epoch and within and job.data != "stateful":
            active = made.skip_first_batches(batches, within)
        for batch in active:
            if job.strategy == "tp":
                torch.distributed.broadcast(batch, 0)
            with made.accumulate(net):
                loss = net(batch).pow(2).mean()
                made.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done += 1
            yield done, loss.item(), float(batch.sum())
            if done in job.save_at:
                made.save_state(None if job.automatic else f"{job.root}/checkpoint_{done}")
            if done >= job.steps:
                return


def _batches_done(job: Job, made: Any) -> int:
    if job.load is None and not job.resume:
        return 0
    return accelerate_ckpt.checkpoints(made).step * job.accumulation


def in_turn(jobs: list[Job], run: Callable[[Job], dict[str, Any]] = train) -> list[dict[str, Any]]:
    """Several jobs one after another in the same processes, each with an accelerator of its own."""
    results = []
    for job in jobs:
        results.append(_without_goodbye(lambda job=job: run(job)))
        forget_accelerators()
    return results


def save_then_load(saves: Job, loads: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was there when one job had saved, and when another had loaded."""
    (saved,), (loaded,) = in_turn([saves]), in_turn([loads], load_only)
    return saved, loaded


def forget_accelerators() -> None:
    """Let the next accelerator of this process be the first."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def _without_goodbye(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`end_training` without the end of the process group, which the next job needs."""
    from accelerate.state import PartialState

    destroy = PartialState.destroy_process_group
    PartialState.destroy_process_group = lambda self, group=None: None  # type: ignore[method-assign]
    try:
        return run()
    finally:
        PartialState.destroy_process_group = destroy  # type: ignore[method-assign]


def committed(root: str | Path) -> list[str]:
    return sorted(path.parent.name for path in Path(root).glob("*/COMMITTED"))


def train_with_hooks(job: Job) -> dict[str, Any]:
    """Hooks as diffusers' scripts have them: they write, and take weights out, on the main process only."""
    made = accelerator(job)
    enable(job, made)
    net, optimizer, *_ = prepare(job, made)

    def save_adapter(models: list[nn.Module], states: list[Any], output_dir: str) -> None:
        if made.is_main_process:
            for each in models:
                torch.save(made.unwrap_model(each).state_dict(), Path(output_dir) / "adapter.bin")
                states.pop()

    def load_adapter(models: list[nn.Module], input_dir: str) -> None:
        while models:
            made.unwrap_model(models.pop()).load_state_dict(torch.load(Path(input_dir) / "adapter.bin"))

    made.register_save_state_pre_hook(save_adapter)
    made.register_load_state_pre_hook(load_adapter)
    made.backward(net(torch.ones(2, _WIDTH)).pow(2).mean())
    optimizer.step()
    made.save_state(f"{job.root}/checkpoint_0")
    saved = full_state(net, optimizer)
    optimizer.step()
    made.load_state(f"{job.root}/checkpoint_0")
    loaded = full_state(net, optimizer)
    made.end_training()
    return {"saved": saved, "loaded": loaded}


def damage_fold_and_preemption(root: str) -> dict[str, Any]:
    """What rank 1 alone meets, and what every rank makes of it."""
    made = accelerator(Job(root=root))
    attached = accelerate_ckpt.checkpoints(accelerate_ckpt.enable(made, root))
    prepared_once = prepare(Job(root=root), made)
    for _ in range(2):
        step(made, *prepared_once)
        made.save_state()
    attached.wait()
    if made.process_index == 1:
        Path(root, "checkpoint_1", "random_states_1.pkl").write_bytes(b"changed")
    made.wait_for_everyone()
    made.load_state()
    after_load = attached.step
    made.free_memory()
    again = prepare(Job(root=root), made)
    step(made, *again)
    made.save_state()
    attached.wait()
    after_fold = [info.step for info in attached.manager.checkpoints()]
    accelerate_ckpt.disable(made)
    os.environ.update(CKPT_SUITE_ROOT=root, CKPT_SUITE_SAVE="{on_preemption: {signals: [SIGUSR1]}}")
    enable_implicitly(made)
    made.save_state()
    if made.process_index == 1:
        signal.raise_signal(signal.SIGUSR1)
    step(made, *again)
    try:
        made.save_state()
    except SystemExit as ended:
        return {"step": after_load, "fold": after_fold, "code": ended.code}
    return {}


class _Told(logging.Handler):
    """Keeps what the roll call says, and lets other ranks wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        torch.distributed.distributed_c10d._get_default_store().set("told", "1")


def who_saves(job: Job, who: dict[int, str]) -> dict[str, Any]:
    """Train; `who` tells for each step whether "all" ranks save there, the "main" one, or one "late"."""
    from accelerate_ckpt import _roll_call

    _roll_call.PATIENCE_SECONDS = 0.5
    logging.getLogger(_roll_call.__name__).addHandler(told := _Told())
    made = accelerator(job)
    enable(job, made, deadline_seconds=60)
    net, optimizer, scheduler, batches = prepare(job, made)
    if job.load is not None:
        made.load_state(job.load)
    states: dict[int, Any] = {}
    for done, _, _ in _steps(job.but(save_at=()), made, (net, optimizer, scheduler, batches)):
        how = who.get(done)
        if how is not None:
            states[done] = full_state(net, optimizer)
        if how == "late" and not made.is_main_process:
            # The main process has been waiting for longer than its patience.
            torch.distributed.distributed_c10d._get_default_store().wait(["told"])
        if how is not None and (how != "main" or made.is_main_process):
            made.save_state(f"{job.root}/checkpoint_{done}")
    if 0 in who:
        made.load_state(f"{job.root}/checkpoint_{max(who)}")
    state = full_state(net, optimizer)
    made.end_training()
    logging.getLogger(_roll_call.__name__).removeHandler(told)
    return {"state": state, "states": states, "told": told.messages}


def one_comes(job: Job, rank: int) -> dict[str, Any]:
    """Train; one rank alone saves the last step, and then all do; return the error of that rank."""
    made = accelerator(job)
    enable(job, made, deadline_seconds=3)
    prepared = prepare(job, made)
    assert list(_steps(job.but(save_at=()), made, prepared))
    error = ""
    if made.process_index == rank:
        try:
            made.save_state(f"{job.root}/alone")
        except DeadlineError as raised:
            error = str(raised)
    torch.distributed.barrier()
    made.save_state(f"{job.root}/together")
    made.end_training()
    return {"error": error}
