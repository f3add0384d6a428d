"""`enable` and `disable`: replacing the methods of one accelerator, and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accelerate_ckpt._checkpoints import AcceleratorCheckpoints
from accelerate_ckpt._host_calls import UNSUPPORTED
from accelerate_ckpt._settings import Settings
from ckpt_core import ConfigError, hosting
from ckpt_core.cadence import SavePolicy
from ckpt_core.disclosure import logger_of
from ckpt_core.options import shows_options
from ckpt_core.retention import RetentionPolicy
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Sink

_logger = logger_of(__name__)

ENDED = 143
"""Exit code of a preempted script that does not check for it: that of a shell after SIGTERM."""


@shows_options(ends=False, stock_files=False, gradients=False, contents=None, override=None, log_costs=True)
def enable(
    accelerator: Accelerator,
    root: str | os.PathLike[str] | Storage | None = None,
    *,
    save: SavePolicy | Mapping[str, Any] | Sequence[Any] | None = None,
    keep: RetentionPolicy | Mapping[str, Any] | Sequence[Any] | None = None,
    sinks: Sequence[Sink] = (),
    **options: Any,
) -> Accelerator:
    """Make `save_state` and `load_state` asynchronous, sharded and committed.

    Collective. What is not given here comes from `CKPT_SUITE_…` in the environment, then from the `ckpt`
    section of the accelerate configuration, then from the defaults. DeepSpeed, Megatron-LM and XLA keep their
    own checkpoints: the accelerator comes back unchanged, with a warning.

    Args:
        accelerator: any accelerator, before or after `prepare`.
        root: where `save_state()` without a directory saves, as `checkpoint_{n}`.
        save: which of the `save_state` calls save; every one if None.
        keep: which checkpoints stay; with automatic naming, `total_limit` if None.
        sinks: receivers of telemetry events.
        **options: `stock_files` (whether plain replicas also get `model.safetensors` and `optimizer.bin`,
            written by the main process while training waits, so that stock `load_state` reads them; False),
            `gradients` (whether a save within an accumulation window holds its gradients; False),
            `contents` ("all" of the models, or "trainable", which refers to what is frozen; the default for
            PEFT models),
            `override` (hyperparameters that `load_state` changes, such as `{"lr": 1e-4}`, once for all
            restarts), `log_costs` (whether the trackers receive `checkpoint/stall_ms`, `durable_s`, `bytes`
            and `overhead` of every save; True), and every other field of `CheckpointOptions` but
            `on_exception`, such as `back_pressure` and `on_error`.

    Raises:
        ConfigError: an option is wrong, or the accelerator is enabled already, or is none.
    """
    _refuse_others(accelerator)
    attached = checkpoints_or_none(accelerator)
    if attached is not None and not attached.implicit:
        raise ConfigError("this accelerator is enabled already; call accelerate_ckpt.disable() first")
    disable(accelerator)
    settings = Settings.resolve({"root": root, "save": save, "keep": keep, **options})
    attach(accelerator, settings, sinks)
    return accelerator


def enable_implicitly(accelerator: Accelerator) -> None:
    """Enable an accelerator for a script that does not; a later `enable` replaces it."""
    attach(accelerator, Settings.resolve({}), implicit=True)


def _refuse_others(accelerator: object) -> None:
    if isinstance(accelerator, Accelerator):
        return
    trainer = any(
        cls.__module__.startswith("transformers.") for cls in type(accelerator).__mro__
    ) and hasattr(accelerator, "train_dataset")
    raise ConfigError(
        f"enable() takes an accelerate.Accelerator, not a {type(accelerator).__name__}"
        + ("; for a Trainer there is enable_trainer()" if trainer else "")
    )


def attach(
    accelerator: Accelerator, settings: Settings, sinks: Sequence[Sink] = (), *, implicit: bool = False
) -> None:
    """Replace methods of this instance; its class and other instances stay."""
    if accelerator.distributed_type in UNSUPPORTED:
        _logger.warning(
            "%s keeps its shards to itself: save_state and load_state stay as they are",
            accelerator.distributed_type.value,
        )
        return
    settings.options.refuse_ends("an Accelerator")
    attached = AcceleratorCheckpoints(accelerator, settings, sinks, implicit=implicit)
    hosting.attach(accelerator, attached, _shadows(attached))


def disable(accelerator: Accelerator) -> Accelerator:
    """Wait for every save and put the accelerator's own methods back; idempotent.

    Raises:
        SaveError: a save in flight failed; the methods are back all the same.
    """
    attached = hosting.detach(accelerator)
    if attached is not None:
        attached.progress.release()
        attached.close()
    return accelerator


def checkpoints(accelerator: Accelerator) -> AcceleratorCheckpoints:
    """Return the checkpoints of an enabled accelerator.

    Raises:
        ConfigError: it is not enabled.
    """
    attached = checkpoints_or_none(accelerator)
    if attached is not None:
        return attached
    if accelerator.distributed_type in UNSUPPORTED:
        engine = accelerator.distributed_type.value
        raise ConfigError(f"{engine} keeps its own checkpoints: there are none of ckpt-suite's")
    raise ConfigError("this accelerator is not enabled: call accelerate_ckpt.enable(accelerator) first")


def checkpoints_or_none(accelerator: Accelerator) -> AcceleratorCheckpoints | None:
    """Return the checkpoints of an accelerator, or None if it is not enabled."""
    attached: AcceleratorCheckpoints | None = hosting.attached_to(accelerator)
    return attached


def _shadows(attached: AcceleratorCheckpoints) -> dict[str, Callable[..., Any]]:
    stock = attached.stock

    def end_training() -> None:
        try:
            # While the process group is still there.
            attached.close()
        finally:
            stock.end_training()

    def free_memory(*objects: Any) -> Any:
        try:
            attached.begin_anew()
        finally:
            freed = stock.free_memory(*objects)
        return freed

    def log(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        attached.note_metrics(values)
        return stock.log(values, *args, **kwargs)

    def prepare_optimizer(*args: Any, **kwargs: Any) -> Any:
        return attached.progress.prepared_optimizer(stock.prepare_optimizer(*args, **kwargs))

    def prepare_data_loader(data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        return attached.progress.loaders.prepare(stock.prepare_data_loader, data_loader, *args, **kwargs)

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        copy = stock.skip_first_batches(dataloader, num_batches)
        attached.progress.loaders.track_copy(dataloader, copy)
        return copy

    return {
        "save_state": _save_state(attached, end_training),
        "load_state": attached.load,
        "end_training": end_training,
        "free_memory": free_memory,
        "log": log,
        "prepare_optimizer": prepare_optimizer,
        "prepare_data_loader": prepare_data_loader,
        "skip_first_batches": skip_first_batches,
    }


def _save_state(attached: AcceleratorCheckpoints, end_training: Callable[[], None]) -> Callable[..., Any]:
    def save_state(
        output_dir: str | None = None,
        safe_serialization: bool = True,  # noqa: FBT001, FBT002 - as in stock
        **_: Any,
    ) -> Path | str | None:
        handle = attached.maybe_save(output_dir, safe_serialization=safe_serialization)
        if attached.implicit and attached.preempted:
            _logger.warning("preempted: the script ends here, with its last checkpoint committed")
            end_training()
            raise SystemExit(ENDED)
        if handle is None:
            return None
        where = attached.directory(output_dir, handle)
        return where if "://" in where else Path(where)

    return save_state
