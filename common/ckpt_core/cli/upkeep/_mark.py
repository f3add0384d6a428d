"""`mark`, `pin` and `unpin`: what a resume passes over, and what no prune takes."""

from __future__ import annotations

from argparse import Namespace

from ckpt_core.cli._arguments import find_step
from ckpt_core.cli._outcome import Outcome
from ckpt_core.commit import Catalog
from ckpt_core.errors import CheckpointNotFoundError, ConfigError
from ckpt_core.types import CheckpointInfo


def pin(arguments: Namespace) -> Outcome:
    if not arguments.reason.strip():
        raise ConfigError("give the reason why it must stay: --reason TEXT")
    storage, step, _ = find_step(arguments.checkpoint, arguments.storage_options)
    Catalog(storage).pin(step, arguments.reason)
    return Outcome(
        fields={"root": storage.url, "step": step, "pinned": arguments.reason},
        parts=[f"step {step} is pinned: {arguments.reason}"],
    )


def unpin(arguments: Namespace) -> Outcome:
    storage, step, _ = find_step(arguments.checkpoint, arguments.storage_options)
    Catalog(storage).unpin(step)
    return Outcome(
        fields={"root": storage.url, "step": step, "pinned": None}, parts=[f"step {step} is not pinned"]
    )


def run(arguments: Namespace) -> Outcome:
    bad = arguments.verdict == "bad"
    if bad and not (arguments.reason or "").strip():
        raise ConfigError("give the reason why it is bad: --reason TEXT")
    storage, step, name = find_step(arguments.checkpoint, arguments.storage_options)
    catalog = Catalog(storage)
    infos = _chosen(catalog, step, name, and_later=arguments.and_later)
    for info in infos:
        if bad:
            catalog.mark_bad(info.name, arguments.reason)
        else:
            catalog.unmark(info.name, bad=True)
    latest = catalog.latest()
    newest = "there is none left" if latest is None else f"it is now {latest.name}"
    return Outcome(
        fields={
            "root": storage.url,
            "names": [info.name for info in infos],
            "bad": arguments.reason if bad else None,
            "newest": None if latest is None else latest.name,
        },
        parts=[
            *(f"{storage.url}/{info.name} is marked as {arguments.verdict}" for info in infos),
            f"what a resume tries first: {newest}",
        ],
    )


def _chosen(catalog: Catalog, step: int, name: str | None, *, and_later: bool) -> list[CheckpointInfo]:
    """Choose by name, else by step; those of the present lineage are preferred."""
    infos = catalog.committed(abandoned=True)
    present = [info for info in infos if not info.abandoned]
    of_step = [i for i in present if i.step == step] or [i for i in infos if i.step == step]
    of_step = [i for i in infos if i.name == name] or of_step
    later = [info for info in present if info.step > step] if and_later else []
    if not of_step and not later:
        catalog.find(step=step)  # raises, with what is there
        raise CheckpointNotFoundError(f"step {step} is gone")
    return of_step + later
