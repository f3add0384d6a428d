"""`show`: the content of one checkpoint, down to every tensor."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

from ckpt_core.cli._arguments import find_any
from ckpt_core.cli._outcome import Outcome, Table, code_text, data_text, metrics_text, moment_text
from ckpt_core.commit import (
    Catalog,
    Manifest,
    TensorEntry,
    describe,
    file_as_root,
    list_tensors,
    look_around,
    plain_files,
    read_manifest,
    read_notes,
    stock_parts,
)
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError
from ckpt_core.formats.frames import RAW, ZSTD
from ckpt_core.hosting import is_torn
from ckpt_core.names import MARKER, METADATA, SIGNATURE
from ckpt_core.options import bytes_text
from ckpt_core.reporting import moment
from ckpt_core.storage import Storage, open_storage, read_small


def run(arguments: Namespace) -> Outcome:
    storage, name, file = find_any(arguments.place, arguments.storage_options, step=arguments.step)
    ours = not file and storage.exists(f"{name}/{MARKER}")
    tensors: Mapping[str, Sequence[TensorEntry]] | None = None
    if not ours and (others := _of_others(storage, name, file)) is not None:
        found, tensors = others
    else:
        found = _shown(storage, name) if ours else _uncommitted(arguments, storage, name)
    a_root = arguments.step is None and name not in arguments.place and "@" not in arguments.place
    if a_root and not found.exit_code:
        place = arguments.place.rstrip("/")
        text = f"the newest that can be used; `ckpt show {place}@STEP` reads and shows one alone"
        found = Outcome(fields=found.fields, parts=[*found.parts, text])
    if not arguments.tensors:
        return found
    if tensors is None:
        keys = {part: f"{part}/{METADATA}" for part in stock_parts(storage, name)}
        tensors = {
            part: list_tensors(read_small(storage, key), f"{storage.url}/{key}")
            for part, key in keys.items()
            if storage.exists(key)
        }
    listed = [
        {**asdict(entry), "num_elements": entry.num_elements}
        for entries in tensors.values()
        for entry in entries
    ]
    parts = [part for part in found.parts if isinstance(part, str) and part]
    return Outcome(
        fields={**found.fields, "tensors": listed},
        parts=[*parts, *_tensor_parts(tensors)],
        exit_code=0 if tensors else found.exit_code,
    )


def _shown(storage: Storage, name: str) -> Outcome:
    catalog, place = Catalog(storage), f"{storage.url}/{name}"
    content = read_manifest(storage, name)
    manifest, digest = Manifest.from_bytes(content), hashlib.sha256(content).hexdigest()
    notes = read_notes(storage)
    try:
        pinned = catalog.pins().get(manifest.step)
    except CorruptCheckpointError as error:
        pinned = str(error)  # the checkpoint is none the worse for it
    pinned = pinned or notes.in_use.get(manifest.step)
    damaged, measured = catalog.known_damage(name), notes.measured(manifest.save_id)
    listed = {field.name: getattr(manifest, field.name) for field in fields(manifest)}
    listed |= {
        "provenance": asdict(manifest.provenance),
        "created_utc": moment_text(manifest.created),
        "files": [asdict(entry) for entry in manifest.files],
        "lineage": asdict(manifest.lineage),
        "weights_of": None if manifest.weights_of is None else asdict(manifest.weights_of),
        "manifest_sha256": digest,
        "signed": storage.exists(f"{name}/{SIGNATURE}"),
    }
    table = Table(
        columns=("FILE", "SIZE", "CHECKSUM"),
        rows=[(entry.path, bytes_text(entry.size_bytes), entry.checksum) for entry in manifest.files],
    )
    return Outcome(
        fields={
            "checkpoint": place,
            "committed": True,
            "pinned": pinned,
            "damaged": damaged,
            "measured": measured,
            **listed,
        },
        parts=[
            *_facts(place, manifest, pinned=pinned, damaged=damaged, measured=measured),
            *_compressed(storage, name, manifest),
            f"manifest:    sha256:{digest}{f', signed: {SIGNATURE}' if listed['signed'] else ''}",
            "",
            table,
        ],
    )


def _compressed(storage: Storage, name: str, manifest: Manifest) -> list[str]:
    if not manifest.plain_sha256:
        return []
    found = plain_files(storage, name, manifest)
    in_planes = any(max(frames.codec, default=RAW) > ZSTD for frames in found.files.values())
    text = "in planes: stock dcp.load cannot read it" if in_planes else "by zstd, which stock dcp.load reads"
    size = bytes_text(Manifest.from_bytes(found.manifest).size_bytes)
    return [f"compressed:  from {size}, {text}; `ckpt cp CHECKPOINT DST --compress none` makes it plain"]


def _uncommitted(arguments: Namespace, storage: Storage, name: str) -> Outcome:
    place = f"{storage.url.rstrip('/')}/{name}"
    found = describe(storage, name)
    if not found:
        raise CheckpointNotFoundError(f"{place}: there is nothing")
    advice = look_around(open_storage(arguments.place, arguments.storage_options)).advice(place)
    text = "; ".join([f"{place} is not a committed checkpoint", *(advice or [found])])
    return Outcome(
        fields={"checkpoint": place, "committed": False},
        parts=[f"{text}; `ckpt verify` compares what can be compared"],
        exit_code=1,
    )


def _of_others(
    storage: Storage, name: str, file: str
) -> tuple[Outcome, Mapping[str, Sequence[TensorEntry]]] | None:
    """Show what others wrote, and its tensors; None for stock DCP and the unknown."""
    is_stock = not file and any(stock_parts(storage, name)) and not storage.exists(f"{name}/metadata.json")
    if is_stock or (not file and is_torn(storage, name)):
        return None
    from ckpt_core.loading import located, open_parts

    try:
        _, files, parts = open_parts(storage, name, file=file)
    except CheckpointNotFoundError:
        if file:
            raise file_as_root(f"{storage.url}/{name}/{file}") from None
        return None
    part = next(iter(parts.values()))
    if not part.kind:
        return None
    entries = [
        TensorEntry(name=each.name, shape=each.shape, dtype=each.form.dtype, size_bytes=each.size_bytes)
        for each in located(parts).values()
    ]
    place = "/".join(filter(None, (files.url, file)))
    elements, size = sum(each.num_elements for each in entries), sum(each.size_bytes for each in entries)
    facts = {
        "checkpoint": place,
        "format": part.kind,
        "step": "" if part.step is None else str(part.step),
        "tensors": f"{len(entries)}, {elements:,} elements, {bytes_text(size)}",
    }
    fields = {"checkpoint": place, "committed": False, "format": part.kind, "step": part.step}
    parts_of = [f"{label + ':':<13}{text}" for label, text in facts.items() if text]
    return Outcome(fields={**fields, "size_bytes": size}, parts=parts_of), {part.kind: entries}


def _tensor_parts(tensors: Mapping[str, Sequence[TensorEntry]]) -> list[str | Table]:
    """Make a table for each part, with the totals of its items."""
    parts: list[str | Table] = []
    for part, entries in tensors.items():
        rows = [
            (e.name, shape, e.dtype, f"{e.num_elements:,}", bytes_text(e.size_bytes))
            for e in entries
            for shape in ("x".join(map(str, e.shape)) or "scalar",)
        ]
        parts += ["", f"{part}:", Table(columns=("TENSOR", "SHAPE", "DTYPE", "ELEMENTS", "SIZE"), rows=rows)]
        for item in sorted({entry.name.partition(".")[0] for entry in entries}):
            of_item = [entry for entry in entries if entry.name.partition(".")[0] == item]
            elements, size = sum(e.num_elements for e in of_item), sum(e.size_bytes for e in of_item)
            parts.append(f"{item}: {len(of_item)} tensors, {elements:,} elements, {bytes_text(size)}")
        total, size = sum(e.num_elements for e in entries), sum(e.size_bytes for e in entries)
        parts.append(f"in all: {len(entries)} tensors, {total:,} elements, {bytes_text(size)}")
    return parts


def _facts(
    place: str, manifest: Manifest, *, pinned: str | None, damaged: str | None, measured: Mapping[str, float]
) -> list[str]:
    known, twins = manifest.provenance, sum(entry.size_bytes for entry in manifest.twins().values())
    line = manifest.lineage
    origin = next((f", from step {step} of {each or 'none'}" for each, step in line.ancestry), "")
    facts = {
        "checkpoint": place,
        "step": str(manifest.step),
        "weights of": f"{whole.name}; no resume takes them" if (whole := manifest.weights_of) else "",
        "committed": f"{moment(manifest.created)} UTC",
        "size": f"{bytes_text(manifest.size_bytes)} in {len(manifest.files)} files",
        "replicas": f"{manifest.replicas}, the second files take {bytes_text(twins)}" if twins else "",
        "chunks": str(manifest.num_chunks),
        "ranks": str(manifest.world_size),
        "pinned": pinned or "",
        "damaged": damaged or "",
        "items": ", ".join(f"{item} ({kind})" for item, kind in sorted(manifest.items.items())),
        "metrics": metrics_text(manifest.metrics),
        "measured": metrics_text(measured),
        "annotations": ", ".join(f"{key}={value!r}" for key, value in sorted(manifest.annotations.items())),
        "parent": "" if known.parent is None else f"{known.parent.name} (step {known.parent.step})",
        "run id": known.run_id,
        "code": code_text(known),
        "data": data_text(known.data),
        "configured": f"sha256:{known.configuration_sha256}" if known.configuration_sha256 else "",
        "written by": ", ".join(f"{name} {version}" for name, version in sorted(manifest.producer.items())),
        "lineage": f"{line.number} ({line.id}){origin}" if line.number else "",
        "save id": manifest.save_id,
    }
    return [f"{label + ':':<13}{text}" for label, text in facts.items() if text]
