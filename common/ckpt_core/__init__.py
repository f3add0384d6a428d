"""Own your training checkpoints: asynchronous, sharded, committed, exact.

Names are imported on first use, so that tools that only list and verify never import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt_core._version import __version__

if TYPE_CHECKING:
    from ckpt_core.cadence import (
        AtSteps,
        Continuous,
        EveryEpochs,
        EveryFraction,
        EverySeconds,
        EverySteps,
        EveryTokens,
        MaxOverhead,
        OnPreemption,
        Optimal,
    )
    from ckpt_core.convert import ExportSummary, export, import_checkpoint
    from ckpt_core.errors import (
        ArchivedError,
        CheckpointError,
        CheckpointExistsError,
        CheckpointNotFoundError,
        ConfigError,
        CoordinationError,
        CorruptCheckpointError,
        DeadlineError,
        IncompatibleCheckpointError,
        LoadError,
        NoRoomError,
        RootBusyError,
        SaveError,
        StagingMemoryError,
        UnsafeCheckpointError,
        UntrustedCheckpointError,
        UploadError,
    )
    from ckpt_core.manager import CheckpointManager
    from ckpt_core.options import CheckpointOptions, Export, Upload
    from ckpt_core.policies import RetentionPolicy, SavePolicy
    from ckpt_core.retention import (
        KeepAll,
        KeepBest,
        KeepEvery,
        KeepEveryEpochs,
        KeepEveryFraction,
        KeepEverySeconds,
        KeepFor,
        KeepLatest,
        KeepSteps,
        KeepThinned,
        KeepWeights,
        KeepWithin,
    )
    from ckpt_core.saving import SaveHandle
    from ckpt_core.state import Counters, TrainState
    from ckpt_core.types import CheckpointInfo
    from ckpt_core.watching import PinnedCheckpoint, annotate, watch

_HOMES = {
    "cadence": "AtSteps Continuous EveryEpochs EveryFraction EverySeconds EverySteps EveryTokens "
    "MaxOverhead OnPreemption Optimal",
    "convert": "ExportSummary export import_checkpoint",
    "errors": "ArchivedError CheckpointError CheckpointExistsError CheckpointNotFoundError ConfigError "
    "CoordinationError CorruptCheckpointError DeadlineError IncompatibleCheckpointError LoadError "
    "NoRoomError RootBusyError SaveError StagingMemoryError UnsafeCheckpointError UntrustedCheckpointError "
    "UploadError",
    "manager": "CheckpointManager",
    "options": "CheckpointOptions Export Upload",
    "retention": "KeepAll KeepBest KeepEvery KeepEveryEpochs KeepEveryFraction KeepEverySeconds "
    "KeepFor KeepLatest KeepSteps KeepThinned KeepWeights KeepWithin",
    "policies": "RetentionPolicy SavePolicy",
    "saving": "SaveHandle",
    "state": "Counters TrainState",
    "types": "CheckpointInfo",
    "watching": "PinnedCheckpoint annotate watch",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "ArchivedError",
    "AtSteps",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointOptions",
    "ConfigError",
    "Continuous",
    "CoordinationError",
    "CorruptCheckpointError",
    "Counters",
    "DeadlineError",
    "EveryEpochs",
    "EveryFraction",
    "EverySeconds",
    "EverySteps",
    "EveryTokens",
    "Export",
    "ExportSummary",
    "IncompatibleCheckpointError",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepEveryEpochs",
    "KeepEveryFraction",
    "KeepEverySeconds",
    "KeepFor",
    "KeepLatest",
    "KeepSteps",
    "KeepThinned",
    "KeepWeights",
    "KeepWithin",
    "LoadError",
    "MaxOverhead",
    "NoRoomError",
    "OnPreemption",
    "Optimal",
    "PinnedCheckpoint",
    "RetentionPolicy",
    "RootBusyError",
    "SaveError",
    "SaveHandle",
    "SavePolicy",
    "StagingMemoryError",
    "TrainState",
    "UnsafeCheckpointError",
    "UntrustedCheckpointError",
    "Upload",
    "UploadError",
    "__version__",
    "annotate",
    "export",
    "import_checkpoint",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        from ckpt_core.vocabulary import NAMES, instead_of

        advice = "" if name.startswith("_") else instead_of(name, __all__)
        # The words of an AttributeError are lost where a class is imported by its name.
        error = ImportError if name in NAMES and name[0].isupper() else AttributeError
        raise error(f"module 'ckpt_core' has no attribute {name!r}{advice}")
    value = getattr(import_module(f"ckpt_core.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
