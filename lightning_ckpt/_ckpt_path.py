"""What `ckpt_path` means: a checkpoint, a root, Lightning's file, a fresh start.

And `LightningModule.load_from_checkpoint` on checkpoints of ours.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch

from ckpt_core.commit import Catalog, look_around
from ckpt_core.coordination import Solo
from ckpt_core.dcp import check_stock, load_plain, read_linked, without_pickle
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    ALLOW_PICKLE,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    UnsafeCheckpointError,
    UntrustedCheckpointError,
)
from ckpt_core.hosting import CheckpointPath, replaced, root_of
from ckpt_core.manager import CheckpointManager
from ckpt_core.names import MARKER, METADATA
from ckpt_core.options import CheckpointOptions
from ckpt_core.state import base_names
from ckpt_core.storage import Storage, open_storage
from ckpt_core.validation import location
from lightning_ckpt._committed import committed_of
from lightning_ckpt._options import Settings
from lightning_ckpt._pacing import continues, requeue_signal
from lightning_ckpt._state import LARGE, MODEL, NewMemory, plain_items

T = TypeVar("T")
_logger = logger_of(__name__)
_STOCK = ".ckpt"
_SHOWN = 4
_WRAPPED = "_ckpt_wrapped"
_INSTANTIATOR = "_instantiator"
_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")

_begun: Final = set[str]()
"""The roots of this process's fits so far."""


def chosen(ckpt_path: Any, settings: Settings, trainer: Any, *, last: bool) -> Any:
    """Return what to load instead of what Lightning has chosen; None to begin afresh."""
    if last or (ckpt_path is None and _is_requeued(settings, trainer)):
        ckpt_path = settings.root
    elif ckpt_path is None:
        return None
    if (problem := location("ckpt_path", ckpt_path)) is not None:
        raise ConfigError(problem)
    if settings.root is None or root_of(ckpt_path) != settings.root or committed_of(settings, further=True):
        return ckpt_path
    _begin_afresh("last" if last else ckpt_path, settings, trainer)
    return None


def _is_requeued(settings: Settings, trainer: Any) -> bool:
    """Return whether SLURM has started again the job that saved the newest checkpoint.

    Only for the first fit of a process: later ones, such as the folds of a cross-validation, begin afresh.
    """
    root = settings.root
    if root is None or root in _begun or str(trainer.state.fn.value) != "fit":
        return False
    _begun.add(root)
    if requeue_signal(trainer) is None:
        return False
    committed = committed_of(settings, further=True)
    if not committed or not continues(
        Catalog(settings.readable_at(root)).manifest(committed[-1].name).annotations
    ):
        return False
    _logger.warning("requeued by SLURM: this fit continues from the newest checkpoint of %s", root)
    return True


def _begin_afresh(ckpt_path: Any, settings: Settings, trainer: Any) -> None:
    """Warn that a first fit starts afresh; refuse anything else without weights."""
    verb = str(trainer.state.fn.value)
    if verb != "fit":
        raise CheckpointNotFoundError(
            f"ckpt_path={str(ckpt_path)!r}: nothing is committed to {settings.root}, so there are no weights "
            f"to {verb} with. Correct dirpath= or ckpt_path, or train first; without ckpt_path a module that "
            "you give is taken as it is"
        )
    if trainer.is_global_zero:
        there = "".join(f"; but {each}" for each in _meant_perhaps(settings))
        _logger.warning("nothing is committed to %s yet: starting afresh%s", settings.root, there)


def _meant_perhaps(settings: Settings) -> list[str]:
    """List what lies in the root besides our checkpoints that may have been meant."""
    storage = settings.storage_at(str(settings.root))
    try:
        stock = sorted(entry.name for entry in storage.list("") if entry.name.endswith(_STOCK))
        runs = look_around(storage).runs
    except (CheckpointError, OSError):
        return []  # the first save will raise it
    found = []
    if stock:
        found.append(
            f"Lightning wrote {', '.join(stock[-_SHOWN:])} there: to go on from one, stop, and call "
            f"fit(..., ckpt_path={f'{settings.root}/{stock[-1]}'!r})"
        )
    if runs:
        found.append(
            f"{', '.join(runs[:_SHOWN])} there hold checkpoints: to go on from one, give it as dirpath="
        )
    return found


LIGHTNINGS_OWN = "meta.pt"
"""The file that marks a directory of Lightning's sharded strategies."""

_LAZY_LOADER = "_lazy_load"
"""How FSDP's strategies read a single file: by pickle, even with `weights_only=True`."""


def path_of(path: str | os.PathLike[str]) -> CheckpointPath:
    """Return the checkpoint that a path names.

    Dots before the name, as a Tuner sets them, are left out: such names are those of saves in flight.
    """
    found = CheckpointPath.of(path)
    return replace(found, name=found.name.lstrip(".") or found.name)


def found_at(path: str, storage_at: Callable[[str], Storage]) -> tuple[str, str] | None:
    """Return root and name of what is at a path, "" for a root; None of stock's."""
    try:
        place, written = path_of(path), CheckpointPath.of(path).name
    except ConfigError:  # a bucket
        pass
    else:
        root = storage_at(place.root)
        if root.exists(f"{place.name}/{MARKER}"):
            return place.root, place.name
        if root.exists(written) or root.exists(f"{written}/{LIGHTNINGS_OWN}"):
            return None
        if root.exists(f"{place.name}/{METADATA}"):
            return place.root, place.name
    if Catalog(storage_at(root_of(path))).committed():
        return root_of(path), ""
    raise CheckpointNotFoundError(
        f"Checkpoint file not found: {path} is neither a committed checkpoint ({MARKER} is missing), "
        "nor a directory that holds some, nor a file or directory that Lightning wrote; check ckpt_path"
    )


def load_stock(
    path: str,
    load: Callable[..., Any],
    strategy: Any,
    options: CheckpointOptions,
    *,
    trusted: bool,
    once: Callable[[Callable[[], None]], None],
) -> dict[str, Any]:
    """Return what `load(weights_only=…)` does: without pickle, unless it is trusted.

    Files are read once; a directory of Lightning's sharded strategies is checked before, by one rank.
    """
    if options.verify_manifest is not None:
        why = "Lightning wrote it, so that it has no manifest for verify_manifest to judge"
        raise UntrustedCheckpointError(f"{path} is not trusted: {why}. Nothing was loaded", why=why)
    if trusted or options.allow_pickle:
        return dict(load(weights_only=False))
    once(lambda: _check(Path(path) / LIGHTNINGS_OWN))
    # Lazily, as Lightning does: tensors stay on disk until copied.
    mapped = functools.partial(torch.load, mmap=True, map_location="cpu", weights_only=True)
    try:
        with ExitStack() as held:
            held.enter_context(without_pickle())
            for module in {sys.modules[cls.__module__] for cls in type(strategy).__mro__}:
                if _LAZY_LOADER in vars(module):
                    held.enter_context(replaced(module, **{_LAZY_LOADER: mapped}))
            return dict(load(weights_only=True))
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            f"{path} holds Python objects that only pickle can rebuild. If you trust who wrote it, give "
            f"{ALLOW_PICKLE}. ({str(error).strip().splitlines()[0]})"
        ) from error


def _check(own: Path) -> None:
    if own.is_file():
        check_stock(own.parent)
        load_plain(read_linked(own), str(own))


def read_our_directories(kind: type[Any]) -> None:
    """Let `load_from_checkpoint` of a module's package read ours; idempotent."""
    names = (f"{each.__module__.partition('.core.')[0]}.core.saving" for each in kind.__mro__)
    saving: Any = next(sys.modules[name] for name in names if name in sys.modules)
    stock = saving.pl_load
    if hasattr(stock, _WRAPPED):
        return

    @functools.wraps(stock)
    def load(path_or_url: Any, **options: Any) -> Any:
        if path_or_url == "":
            raise CheckpointNotFoundError(
                'the path of the checkpoint is "", as best_model_path is while none is committed, or has the '
                "metric of KeepBest"
            )
        if not _is_ours(path_or_url):
            return stock(path_or_url, **options)
        allow_pickle = options.get("weights_only") is False
        return read(path_or_url, map_location=options.get("map_location"), allow_pickle=allow_pickle)

    setattr(load, _WRAPPED, True)
    saving.pl_load = load


def load_from_checkpoint(kind: type[T], path: str | os.PathLike[str], **options: Any) -> T:
    """Make a module with the weights and hyperparameters of a checkpoint.

    It is `kind.load_from_checkpoint`, which reads checkpoints of ours from then on.

    Args:
        kind: the class of the module or data module.
        path: a checkpoint, a root, which stands for its newest, or a file that Lightning wrote.
        **options: what that method takes: `map_location`, `strict`, `weights_only`, hyperparameters.

    Raises:
        CheckpointError: it cannot be read; see `CheckpointManager.load`.
    """
    read_our_directories(kind)
    plain = {"weights_only": True, **options}  # Lightning's own default for a URL is to unpickle anything
    return cast("T", cast("Any", kind).load_from_checkpoint(path, **plain))


def _is_ours(path: Any) -> bool:
    if not isinstance(path, str | os.PathLike) or os.fspath(path).startswith("http"):
        return False
    try:
        return found_at(os.fspath(path), open_storage) is not None
    except (CheckpointError, OSError):
        return False  # Lightning will raise it


def read(path: str | os.PathLike[str], *, map_location: Any, allow_pickle: bool) -> dict[str, Any]:
    """Read what Lightning's own file would hold, without optimizers.

    A root stands for its newest checkpoint.

    Not collective: every process that asks reads the whole of the weights.
    """
    root, name = found_at(os.fspath(path), open_storage) or ("", "")
    weights = NewMemory(MODEL, LARGE)
    with CheckpointManager(root, coordinator=Solo(), allow_pickle=allow_pickle) as manager:
        manager.load(weights, name=name or None)
    if bases := base_names(weights.saved):
        _logger.warning(
            "%s holds only what was trained: call load_from_checkpoint(..., strict=False) for a module whose "
            "__init__ makes the base that it was trained on (%s). Here nobody compares that base; a fit does",
            path,
            ", ".join(bases),
        )
    checkpoint = plain_items(weights.saved, weights.tree.get(LARGE, {}))
    if not allow_pickle:
        _refuse_foreign_instantiators(os.fspath(path), checkpoint)
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    device = None if map_location is None or callable(map_location) else torch.device(map_location)
    checkpoint["state_dict"] = {
        name: value.to(device) if device is not None and isinstance(value, torch.Tensor) else value
        for name, value in weights.tree.get(MODEL, {}).items()
    }
    return checkpoint


def _refuse_foreign_instantiators(path: str, checkpoint: Mapping[str, Any]) -> None:
    """Refuse hyperparameters that name a foreign function to import and call.

    Lightning itself began to refuse them with 2.6.
    """
    for key, value in checkpoint.items():
        named = value.get(_INSTANTIATOR) if isinstance(value, Mapping) else None
        if named is not None and named not in _INSTANTIATORS:
            raise UnsafeCheckpointError(
                f"{path}: {key!r} names {named!r:.200} to be imported and called, which is none of "
                "Lightning's own instantiators; it may be an attack and was not executed. If you trust "
                "who wrote this checkpoint, load it with weights_only=False"
            )
