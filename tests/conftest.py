from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Generator
from importlib.util import find_spec

import pytest
from hypothesis import settings

from tests.support.emulators import emulator

pytest.register_assert_rewrite("ckpt_core.testing._storage_suite")

# A busy machine is no defect: no property may fail for being slow.
settings.register_profile("ckpt-suite", deadline=None)
settings.load_profile("ckpt-suite")

# gcsfs asks Google over gRPC what kind of bucket it has, which on an emulator ends in a minute of time-outs.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


# What ranks would spend most of a test on: imports.
_HEAVY = (
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining", "ckpt_core.manager", "lightning.pytorch", "pytorch_lightning",
    "accelerate", "transformers.trainer",
)  # fmt: skip


def pytest_collection_finish() -> None:
    """Have the fork server of `run_ranks` import, once, what the chosen tests have imported already."""
    multiprocessing.set_forkserver_preload([name for name in _HEAVY if name in sys.modules])


@pytest.fixture(scope="session")
def s3_endpoint() -> Generator[str]:
    """An S3 emulator; credentials are `testing`, `testing`; tests make their own buckets."""
    _require("moto", "s3fs")
    with emulator("s3") as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def gcs_endpoint() -> Generator[str]:
    """A GCS emulator, for `token="anon"`; tests make their own buckets."""
    _require("gcp_storage_emulator", "gcsfs")
    with emulator("gcs") as endpoint:
        yield endpoint


def _require(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; pip install 'ckpt-suite[dev]'")
