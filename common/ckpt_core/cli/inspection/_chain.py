"""The chain of a checkpoint: what its state continues, parent by parent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

from ckpt_core.cli._outcome import Table, moment_text, time_text
from ckpt_core.commit import Catalog, Manifest, countable_names, read_all
from ckpt_core.errors import CheckpointError
from ckpt_core.names import original_name
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo, DataPosition, Parent, Provenance

LinkState: TypeAlias = Literal["here", "pruned", "replaced", "altered", "elsewhere", "unreadable"]
_NOTES: Mapping[LinkState, str] = {
    "here": "",
    "pruned": "not in this root any more",
    "replaced": "another checkpoint has its name now",
    "altered": "its manifest is another than its child names",
    "elsewhere": "in another root",
    "unreadable": "its manifest cannot be read",
}
_SHOWN_DIGITS = 12


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ChainLink:
    """One checkpoint of a chain.

    Attributes:
        name: of its directory.
        step: optimizer steps done.
        state: whether it is there, or why not.
        manifest: its manifest, if it is there.
    """

    name: str
    step: int
    state: LinkState = "here"
    manifest: Manifest | None = None

    @property
    def note(self) -> str:
        """What there is to say of it, in words."""
        if self.manifest is None:
            return _NOTES[self.state]
        provenance = self.manifest.provenance
        if provenance.parent is None:
            return "began here" if provenance.run_id else "its parent is unknown: of an earlier version"
        return ""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields for `--json`."""
        fields: dict[str, Any] = {"name": self.name, "step": self.step, "state": self.state}
        if self.manifest is not None:
            known = self.manifest.provenance
            fields |= {
                "created": self.manifest.created,
                "created_utc": moment_text(self.manifest.created),
                "run_id": known.run_id,
                "code_version": known.code_version,
                "code_dirty": known.code_dirty,
                "lineage": self.manifest.lineage.id,
            }
        return fields


def chain_of(storage: Storage, name: str, manifest: Manifest, *, most: int) -> Iterator[ChainLink]:
    """Yield a checkpoint and what it continues, as far as the manifests are there.

    Args:
        storage: its root.
        name: of the checkpoint.
        manifest: its manifest.
        most: parents to follow.
    """
    yield ChainLink(name=name, step=manifest.step, manifest=manifest)
    names = countable_names(storage) if manifest.provenance.parent is not None and most else ()
    seen = {manifest.save_id}
    for _ in range(most):
        parent = manifest.provenance.parent
        if parent is None or parent.save_id in seen:  # no save makes a circle
            return
        seen.add(parent.save_id)
        link = _link(storage, parent, names)
        yield link
        if link.manifest is None:
            return
        manifest = link.manifest


def _link(storage: Storage, parent: Parent, names: Sequence[str]) -> ChainLink:
    state, info = _whereabouts(storage, parent, names)
    if info is None:
        return ChainLink(name=parent.name, step=parent.step, state=state)
    try:
        manifest = Catalog(storage).manifest(info.name)
    except (CheckpointError, OSError):
        return ChainLink(name=info.name, step=parent.step, state="unreadable")
    return ChainLink(name=info.name, step=manifest.step, manifest=manifest)


def _whereabouts(
    storage: Storage, parent: Parent, names: Sequence[str]
) -> tuple[LinkState, CheckpointInfo | None]:
    """Find a parent in a root by the save that wrote it; names may be used again."""
    if parent.elsewhere:
        return "elsewhere", None
    alike = [name for name in names if original_name(name).partition(".run-")[0] == parent.name]
    found, _ = read_all(alike, lambda name: Catalog(storage).marker(name).info(name))
    info = next((each for each in found if each.save_id == parent.save_id), None)
    if info is None:
        return ("replaced" if any(each.name == parent.name for each in found) else "pruned"), None
    return ("here", info) if info.manifest_sha256 == parent.manifest_sha256 else ("altered", None)


def chain_table(links: Sequence[ChainLink]) -> Table:
    """Show a chain, the newest first."""
    return Table(
        columns=("STEP", "CHAIN", "COMMITTED (UTC)", "RUN", "CODE", "DATA", ""),
        rows=[
            (
                str(link.step),
                f"{'<- ' if place else ''}{link.name}",
                *(("", "", "", "") if link.manifest is None else _facts(link.manifest)),
                link.note,
            )
            for place, link in enumerate(links)
        ],
    )


def _facts(manifest: Manifest) -> tuple[str, str, str, str]:
    known = manifest.provenance
    return (
        time_text(manifest.created),
        known.run_id,
        code_text(known, digits=_SHOWN_DIGITS),
        data_text(known.data),
    )


def code_text(known: Provenance, *, digits: int | None = None) -> str:
    """Format a code version: a commit, and whether files were changed."""
    version = known.code_version
    if digits is not None and version.isalnum():
        version = version[:digits]
    return f"{version}, changed" if version and known.code_dirty else version


def data_text(data: Mapping[str, DataPosition]) -> str:
    """Format positions in data: `epoch 3, 1,200 of 5,000 samples`."""
    return "; ".join(
        f"{name}: {_position_text(each)}" if len(data) > 1 else _position_text(each)
        for name, each in sorted(data.items())
    )


def _position_text(position: DataPosition) -> str:
    epoch = "" if position.epoch is None else f"epoch {position.epoch}"
    of = "" if position.of is None else f" of {position.of:,}"
    samples = "" if position.samples is None else f"{position.samples:,}{of} samples"
    return ", ".join(filter(None, (epoch, samples)))
