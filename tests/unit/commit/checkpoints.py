"""Small committed checkpoints, and storages of both kinds to keep them in."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Mapping

from torch.distributed.checkpoint.metadata import Metadata

from ckpt_core.commit import Manifest, begin, commit
from ckpt_core.formats.checksums import checksum
from ckpt_core.names import step_name
from ckpt_core.storage import Storage, object_storage
from ckpt_core.types import CheckpointInfo, FileEntry
from tests.kit.memory import MemoryStorage

FILES = {
    "__0_0.distcp": bytes(range(256)) * 40,
    "__1_0.distcp": b"\0" * 4900,
    "model/__0_0.distcp": b"nested",
    "rank-00000.json": b"{}",
    # Written last, as by a save: on an object store it alone would be a stock checkpoint.
    ".metadata": pickle.dumps(Metadata({}, storage_data={})),
}


def posix_like() -> Storage:
    return MemoryStorage()


def bucket_like() -> Storage:
    return object_storage(f"memory://{secrets.token_hex(8)}/run")


def manifest_of(
    step: int, files: Mapping[str, bytes] = FILES, metrics: Mapping[str, float] | None = None
) -> Manifest:
    return Manifest(
        save_id=f"{step:08x}",
        step=step,
        created=1_700_000_000.0 + step,
        world_size=2,
        items={"model": "sharded", "rng": "per_rank"},
        metrics=metrics or {"val_loss": 1 / (step + 1)},
        annotations={"note": "a test"},
        producer={"ckpt_suite": "0"},
        files=tuple(
            FileEntry(path=path, size_bytes=len(content), checksum=checksum(content))
            for path, content in files.items()
        ),
    )


def write_files(storage: Storage, working: str, files: Mapping[str, bytes] = FILES) -> None:
    for path, content in files.items():
        storage.write_bytes(f"{working}/{path}", content)


def save(storage: Storage, step: int, *, name: str | None = None, **manifest: object) -> CheckpointInfo:
    """All of a save, as the coordinator sees it."""
    name = name or step_name(step)
    working = begin(storage, name, f"{step:08x}")
    write_files(storage, working)
    return commit(storage, working, name, manifest_of(step, **manifest))


def save_over(storage: Storage, step: int, name: str) -> CheckpointInfo:
    """A save that takes the place of a checkpoint of that name."""
    working = begin(storage, name, f"{step:08x}", replace=True)
    write_files(storage, working)
    return commit(storage, working, name, manifest_of(step), replace=True)
