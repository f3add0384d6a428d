from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import sys
from collections.abc import Generator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import settings

from tests.frozen import freeze, remember_entry_points
from tests.kit.disk import real_fsync
from tests.support.emulators import emulator, forget_memory, missing_for
from tests.support.fork_server import start_fork_server, use_fork_server
from tests.support.thorough import THOROUGH

# All that is imported stays: to look through it again and again is a tenth of the time that imports take.
gc.disable()

pytest.register_assert_rewrite("ckpt_core.testing._storage_suite")

# A busy machine is no defect: no property may fail for being slow.
settings.register_profile("ckpt-suite", deadline=None, max_examples=1000 if THOROUGH else 30)
settings.load_profile("ckpt-suite")

# gcsfs asks Google over gRPC what kind of bucket it has, which on an emulator ends in a minute of time-outs.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# Where more processes run than there are cores, the threads of one operator spin while they wait for one
# another, longer than they compute; even a tiny batch norm has some. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nothing looks for a git commit here, but for the tests of that.
os.environ.setdefault("CKPT_SUITE_CODE_VERSION", "")

# For its logs torch looks up the name of every peer of a TCPStore, which no hosts file has in its IPv6 form:
# each connection asks a name server, and an answer that is lost holds it up for 5 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


# What ranks would spend most of a test on: imports. The first optimizer of a process imports `torch._dynamo`,
# and its first `torch.compile` what is behind it.
_OF_TORCH = (
    "torch._dynamo.repro.after_dynamo", "torch.profiler", "numpy.ma",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch.distributed.pipelining", "ckpt_core.manager", "pytest",
    "tests.support.abandoned_workers",
)  # fmt: skip
_OF_HOSTS = (
    "lightning.pytorch", "pytorch_lightning", "accelerate", "transformers.trainer",
    "torchdata.stateful_dataloader", "lightning_ckpt._hooks", "accelerate_ckpt.trainer._checkpoints",
)  # fmt: skip
_FORK_SERVER = pytest.StashKey[str | None]()
_QUICK = "not slow"
"""These need no fork server: they start no processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take for slow what starts ranks or an emulator, and begin with the files of what is slow.

    They take longest; no worker should be left alone with one in the end.
    """
    for item in items:
        if item.get_closest_marker("distributed") or item.get_closest_marker("emulator"):
            item.add_marker("slow")
    longest = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in longest)


def pytest_configure(config: pytest.Config) -> None:
    """Have one fork server for all workers of xdist, which imports while they collect."""
    if (address := getattr(config, "workerinput", {}).get("fork_server")) is not None:
        use_fork_server(address)
    elif getattr(config.option, "numprocesses", None) and config.option.markexpr != _QUICK:
        hosts = [name for name in _OF_HOSTS if find_spec(name.partition(".")[0]) is not None]
        multiprocessing.set_forkserver_preload([*_OF_TORCH, *hosts, "tests.frozen"])
        config.stash[_FORK_SERVER] = start_fork_server()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["fork_server"] = node.config.stash.get(_FORK_SERVER, None)


def pytest_collection_finish() -> None:
    """Import what the chosen tests need, once, and in the fork server of `run_ranks`; set it all aside."""
    of_torch = _OF_TORCH if "torch" in sys.modules else ()
    of_hosts = [name for name in _OF_HOSTS if name in sys.modules]
    multiprocessing.set_forkserver_preload([*of_torch, *of_hosts, "tests.frozen"])
    for name in of_torch:
        # Not by the first optimizer: what is imported behind `freeze` is part of every full collection.
        import_module(name)
    freeze()
    gc.enable()
    _let_loggers_propagate()
    remember_entry_points()


def _let_loggers_propagate() -> None:
    """Let all messages come to the root's handlers, as pytest has them anyway.

    Else it adds its handlers to each logger that does not propagate, of which torch has sixty, and takes them
    away again, three times in a test: of most tests that is a third.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
            logger.propagate = True


@pytest.fixture(autouse=True, scope="module")
def _files_leave_nothing_to_look_through() -> None:
    """Set aside what the files before have left: reports, caches, modules."""
    freeze()


@pytest.fixture(autouse=True)
def _memory_forgets() -> Generator[None]:
    yield
    forget_memory()


@pytest.fixture
def disk_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the disk itself: the kernel is asked to sync."""
    monkeypatch.setattr(os, "fsync", real_fsync)


@pytest.fixture(scope="session")
def s3_endpoint() -> Generator[str]:
    """An S3 emulator; credentials are `testing`, `testing`; tests make their own buckets."""
    _require("moto", "s3fs")
    import botocore.session

    with pytest.MonkeyPatch.context() as patch, emulator("s3") as endpoint:
        # Every client would parse botocore's description of S3, some megabytes of JSON, again.
        patch.setattr(botocore.session, "create_loader", cache(botocore.session.create_loader))
        yield endpoint


@pytest.fixture(scope="session")
def gcs_endpoint() -> Generator[str]:
    """A GCS emulator, for `token="anon"`; tests make their own buckets."""
    _require("werkzeug", "gcsfs", "obstore")
    with emulator("gcs") as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def azure_endpoint() -> Generator[str]:
    """An emulator of Azure's blob storage, with one account; tests make their own containers."""
    _require("werkzeug", "adlfs", "obstore")
    if missing := missing_for("azure"):
        pytest.skip(missing)
    with emulator("azure") as endpoint:
        yield endpoint


def _require(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; make setup")
