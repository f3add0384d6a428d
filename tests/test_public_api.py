"""The public surface, pinned: adding or losing a name is a decision, not an accident."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

FACADES = [
    "ckpt_core",
    "ckpt_core.commit",
    "ckpt_core.coordination",
    "ckpt_core.dcp",
    "ckpt_core.loading",
    "ckpt_core.preemption",
    "ckpt_core.root",
    "ckpt_core.saving",
    "ckpt_core.staging",
    "ckpt_core.state",
    "ckpt_core.storage",
    "ckpt_suite",
    "lightning_ckpt",
    "accelerate_ckpt",
]


@pytest.mark.parametrize("name", FACADES)
def test_every_public_name_exists_and_is_listed_in_order(name: str) -> None:
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__, key=lambda public: (not public.isupper(), public))
    for public in module.__all__:
        assert getattr(module, public) is not None


def test_the_names_users_meet_are_these() -> None:
    import ckpt_core

    assert set(ckpt_core.__all__) == {
        *("CheckpointManager", "CheckpointOptions", "CheckpointInfo", "SaveHandle", "TrainState", "Counters"),
        *("Upload", "UploadError"),
        "import_checkpoint",
        *("watch", "annotate", "PinnedCheckpoint"),
        *(
            "SavePolicy",
            "EverySteps",
            "EveryEpochs",
            "EveryTokens",
            "Export",
            "AtSteps",
            "EverySeconds",
            "EveryFraction",
            "OnPreemption",
            "Optimal",
            "MaxOverhead",
            "Continuous",
        ),
        *("RetentionPolicy", "KeepLatest", "KeepEvery", "KeepEverySeconds", "KeepBest", "KeepFor"),
        *(
            "KeepSteps",
            "KeepThinned",
            "KeepWithin",
            "KeepWeights",
            "KeepEveryEpochs",
            "KeepEveryFraction",
            "KeepAll",
            "__version__",
            "export",
            "ExportSummary",
        ),
        *(
            "CheckpointError",
            "ConfigError",
            "CheckpointNotFoundError",
            "CheckpointExistsError",
            "RootBusyError",
        ),
        *("CorruptCheckpointError", "IncompatibleCheckpointError", "UnsafeCheckpointError", "SaveError"),
        "UntrustedCheckpointError",
        *(
            "LoadError",
            "ArchivedError",
            "NoRoomError",
            "CoordinationError",
            "DeadlineError",
            "StagingMemoryError",
        ),
    }
    assert {"ShardedCheckpoint", "ShardedCheckpointIO"} <= set(
        importlib.import_module("lightning_ckpt").__all__
    )
    assert {"enable", "disable", "enable_trainer"} <= set(importlib.import_module("accelerate_ckpt").__all__)


def test_the_name_that_is_installed_has_the_names_of_the_core_and_is_as_cheap() -> None:
    code = (
        "import sys, ckpt_core, ckpt_suite\n"
        "assert ckpt_suite.__all__ == ckpt_core.__all__ == dir(ckpt_suite)\n"
        "assert ckpt_suite.EverySteps is ckpt_core.EverySteps and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    import ckpt_suite

    with pytest.raises(ImportError, match="here it is KeepLatest"):
        ckpt_suite.KeepLast  # noqa: B018


def test_the_package_is_cheap_to_import_until_it_is_used() -> None:
    code = "import sys, ckpt_core; ckpt_core.EverySteps(3); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("module", "name", "own", "refused"),
    [
        ("ckpt_core", "CheckpointManager", {}, set()),
        (
            "accelerate_ckpt",
            "enable",
            {"stock_files": False, "gradients": False, "log_costs": True},
            {"on_exception"},
        ),
        (
            "accelerate_ckpt",
            "enable_trainer",
            {"stock_files": None, "override": None, "log_costs": True},
            {"gradients"},
        ),
        (
            "lightning_ckpt",
            "setup_fabric",
            {"contents": None, "sinks": (), "log_costs": True},
            {"on_exception", "override"},
        ),
    ],
)
def test_a_signature_shows_every_option_that_is_taken_and_none_that_is_refused(
    module, name, own, refused
) -> None:
    from ckpt_core import CheckpointOptions

    shown = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    assert {each: shown[each].default for each in own} == own
    assert not refused & shown.keys()
    for option in inspect.signature(CheckpointOptions).parameters.values():
        if option.name not in refused:
            assert (shown[option.name].default, shown[option.name].kind) == (option.default, option.kind)
    assert [each for each in shown.values() if each.kind is each.VAR_KEYWORD] == []
