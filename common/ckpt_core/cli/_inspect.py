"""`ls` and `show`, `pin` and `unpin`: what there is, and what is protected."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict, fields

from ckpt_core.cli._outcome import Outcome, Table, metrics_text, time_text
from ckpt_core.cli._places import open_checkpoint, open_root
from ckpt_core.commit import Catalog, Manifest, replaced
from ckpt_core.errors import CheckpointNotFoundError
from ckpt_core.options import bytes_text
from ckpt_core.types import CheckpointInfo


def ls(arguments: Namespace) -> Outcome:
    """List the committed checkpoints of a root, and what is damaged or torn."""
    storage = open_root(arguments.root, arguments.storage_options)
    catalog = Catalog(storage)
    infos, torn, quarantined = catalog.committed(abandoned=True), catalog.torn(), catalog.quarantined()
    summary = f"{len(infos)} committed in {storage.url}, {bytes_text(sum(i.size_bytes for i in infos))}"
    return Outcome(
        fields={
            "root": storage.url,
            "checkpoints": [asdict(info) for info in infos],
            "torn": torn,
            "quarantined": quarantined,
            "replaced": replaced(storage),
        },
        parts=[
            *([_info_table(infos)] if infos else []),
            summary,
            *(f"marked as damaged: {i.name}: {i.damaged}" for i in infos if i.damaged is not None),
            *(f"marked as bad: {i.name}: {i.bad}" for i in infos if i.bad is not None),
            *(f"abandoned: {i.name}" for i in infos if i.abandoned),
            *(f"torn or being written: {name}" for name in torn),
            *(f"damaged and moved aside: {name}" for name in quarantined),
            *(f"not ours and moved aside: {name}" for name in replaced(storage)),
        ],
    )


def show(arguments: Namespace) -> Outcome:
    """Show what one checkpoint promises."""
    storage, name = open_checkpoint(arguments.checkpoint, arguments.storage_options)
    catalog = Catalog(storage)
    place = f"{storage.url}/{name}"
    try:
        manifest = catalog.manifest(name)
    except CheckpointNotFoundError:
        if not storage.list(name):
            raise CheckpointNotFoundError(f"{place}: there is nothing") from None
        return _show_uncommitted(place)
    pinned, damaged = catalog.pins().get(manifest.step), catalog.known_damage(name)
    listed = {field.name: getattr(manifest, field.name) for field in fields(manifest)}
    listed |= {"files": [asdict(entry) for entry in manifest.files], "lineage": asdict(manifest.lineage)}
    table = Table(
        columns=("FILE", "SIZE", "CHECKSUM"),
        rows=[(entry.path, bytes_text(entry.size_bytes), entry.checksum) for entry in manifest.files],
    )
    return Outcome(
        fields={"checkpoint": place, "committed": True, "pinned": pinned, "damaged": damaged, **listed},
        parts=[*_facts(place, manifest, pinned=pinned, damaged=damaged), "", table],
    )


def _show_uncommitted(place: str) -> Outcome:
    text = f"{place} is not a committed checkpoint: torn, or not written by ckpt-suite; try `ckpt verify`"
    return Outcome(fields={"checkpoint": place, "committed": False}, parts=[text], exit_code=1)


def pin(arguments: Namespace) -> Outcome:
    """Protect a step from pruning."""
    storage = open_root(arguments.root, arguments.storage_options)
    Catalog(storage).pin(arguments.step, arguments.reason)
    return Outcome(
        fields={"root": storage.url, "step": arguments.step, "pinned": arguments.reason},
        parts=[f"step {arguments.step} is pinned: {arguments.reason}"],
    )


def unpin(arguments: Namespace) -> Outcome:
    """Take the protection of a step away."""
    storage = open_root(arguments.root, arguments.storage_options)
    Catalog(storage).unpin(arguments.step)
    return Outcome(
        fields={"root": storage.url, "step": arguments.step, "pinned": None},
        parts=[f"step {arguments.step} is not pinned"],
    )


def _info_table(infos: Iterable[CheckpointInfo]) -> Table:
    return Table(
        columns=("STEP", "NAME", "COMMITTED (UTC)", "SIZE", "RANKS", "METRICS", "PINNED"),
        rows=[
            (
                str(info.step),
                info.name,
                time_text(info.created),
                bytes_text(info.size_bytes),
                str(info.world_size),
                metrics_text(info.metrics),
                info.pinned or "",
            )
            for info in infos
        ],
    )


def _facts(place: str, manifest: Manifest, *, pinned: str | None, damaged: str | None) -> list[str]:
    facts = {
        "checkpoint": place,
        "step": str(manifest.step),
        "committed": f"{time_text(manifest.created)} UTC",
        "size": f"{bytes_text(manifest.size_bytes)} in {len(manifest.files)} files",
        "chunks": str(manifest.num_chunks),
        "ranks": str(manifest.world_size),
        "pinned": pinned or "",
        "damaged": damaged or "",
        "items": ", ".join(f"{item} ({kind})" for item, kind in sorted(manifest.items.items())),
        "metrics": metrics_text(manifest.metrics),
        "annotations": ", ".join(f"{key}={value!r}" for key, value in sorted(manifest.annotations.items())),
        "written by": ", ".join(f"{name} {version}" for name, version in sorted(manifest.producer.items())),
        "save id": manifest.save_id,
    }
    return [f"{label + ':':<13}{text}" for label, text in facts.items() if text]
