"""`verify`: read checkpoints back and compare them with what was committed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict

from ckpt_core.cli._outcome import Outcome
from ckpt_core.cli._places import open_checkpoint, open_root
from ckpt_core.commit import Catalog, verify, verify_stock
from ckpt_core.errors import CheckpointNotFoundError, ConfigError, FileFailure
from ckpt_core.names import MARKER, is_corrupt, is_incomplete, is_trash
from ckpt_core.storage import Storage


def run(arguments: Namespace) -> Outcome:
    """Verify a checkpoint, or those chosen of a root, or what stock DCP wrote."""
    wants_root = arguments.step is not None or arguments.all
    if not wants_root and (found := _one_checkpoint(arguments)) is not None:
        return found
    storage = open_root(arguments.place, arguments.storage_options)
    names = _names(Catalog(storage), arguments)
    if names:
        return _outcome(storage, {name: verify(storage, name) for name in names})
    if wants_root:
        raise CheckpointNotFoundError(f"{storage.url}: no checkpoint is committed there")
    return _stock(arguments)


def _one_checkpoint(arguments: Namespace) -> Outcome | None:
    """The outcome for a place that is a checkpoint, committed or torn; None if it is something else."""
    try:
        storage, name = open_checkpoint(arguments.place, arguments.storage_options)
    except ConfigError:
        return None  # a bucket has no parent; if more is wrong, opening it as a root will tell
    if is_incomplete(name) or is_trash(name) or is_corrupt(name) or storage.exists(f"{name}/{MARKER}"):
        if not storage.list(name):
            raise CheckpointNotFoundError(f"{storage.url}/{name}: there is nothing")
        return _outcome(storage, {name: verify(storage, name)})
    return None


def _names(catalog: Catalog, arguments: Namespace) -> list[str]:
    if arguments.step is not None:
        return [catalog.find(step=arguments.step).name]
    names = [info.name for info in catalog.committed()]
    return names if arguments.all else names[-1:]


def _stock(arguments: Namespace) -> Outcome:
    storage, name = open_checkpoint(arguments.place, arguments.storage_options)
    return _outcome(storage, {name: verify_stock(storage, name)}, note=" (stock DCP, by its CRC32s)")


def _outcome(storage: Storage, results: dict[str, Sequence[FileFailure]], note: str = "") -> Outcome:
    parts: list[str] = []
    for name, failures in results.items():
        parts.append(f"{'FAILED' if failures else 'ok':<8}{storage.url}/{name}{note}")
        parts += [f"  {failure}" for failure in failures]
    rows = [
        {"name": name, "ok": not failures, "failures": [asdict(failure) for failure in failures]}
        for name, failures in results.items()
    ]
    return Outcome(
        fields={"root": storage.url, "checkpoints": rows}, parts=parts, exit_code=int(any(results.values()))
    )
