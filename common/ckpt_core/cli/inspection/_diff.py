"""`diff`: what of two checkpoints differs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from ckpt_core.cli._arguments import find_any
from ckpt_core.cli._outcome import Outcome, ProgressLine, Table, code_text, data_text, moment_text
from ckpt_core.commit import Catalog, Manifest, describe
from ckpt_core.errors import CheckpointNotFoundError, ConfigError
from ckpt_core.hosting import is_torn
from ckpt_core.names import MARKER
from ckpt_core.storage import Storage
from ckpt_core.types import SavedTensor

if TYPE_CHECKING:  # of the commands only this one needs torch, which takes a second to import
    from ckpt_core.comparison import Comparison

TROUBLE: Final = 2
"""The exit code if the two cannot be compared, as of the program of that name."""


def run(arguments: Namespace) -> Outcome:
    from ckpt_core.comparison import compare

    a, b = _places(arguments)
    with ProgressLine("comparing", 0) as progress:
        found = compare(
            a, b, only=arguments.only, quick=arguments.quick, seen=progress.add, expect=progress.expect
        )
    manifests = [
        Catalog(at).manifest(name) if not file and at.exists(f"{name}/{MARKER}") else None
        for at, name, file in (a, b)
    ]
    known = [{} if each is None else _facts(each) for each in manifests]
    facts = [(name, *(each.get(name, "") for each in known)) for name in {**known[0], **known[1]}]
    facts = [fact for fact in facts if fact[1] != fact[2]]
    urls = ["/".join(filter(None, (storage.url, name, file))) for storage, name, file in (a, b)]
    items = [set() if each is None else set(each.items) for each in manifests]
    return Outcome(
        fields={
            "a": urls[0],
            "b": urls[1],
            "equal": found.equal,
            "facts": [dict(zip(("name", "a", "b"), fact, strict=True)) for fact in facts],
            "items": {"added": sorted(items[1] - items[0]), "removed": sorted(items[0] - items[1])},
            "tensors": [{**asdict(each), "a": _form(each.a), "b": _form(each.b)} for each in found.tensors],
            "values": [asdict(each) for each in found.values],
            "num_tensors": found.num_tensors,
            "num_read": found.num_read,
            "undecided": list(found.undecided),
        },
        parts=[
            f"a: {urls[0]}",
            f"b: {urls[1]}",
            *([Table(columns=("FACT", "A", "B"), rows=facts)] if facts else []),
            *_parts(found),
            _summary(found),
        ],
        exit_code=TROUBLE if found.undecided else int(not found.equal),
    )


def _places(arguments: Namespace) -> tuple[tuple[Storage, str, str], tuple[Storage, str, str]]:
    place, other, steps = arguments.place, arguments.other, arguments.steps
    if (other is None) == (steps is None):
        raise ConfigError("name two checkpoints, or one root and --steps A B")

    one_is_url = "://" in f"{place} {other}"

    def find(where: str, step: int | None = None) -> tuple[Storage, str, str]:
        # Options are for URLs: beside one, a local path has none, and two local paths refuse them.
        options = arguments.storage_options if "://" in where or not one_is_url else {}
        storage, name, file = find_any(where, options, step=step)
        if not file and is_torn(storage, name):
            raise CheckpointNotFoundError(f"{storage.url}/{name}: {describe(storage, name)}")
        return storage, name, file

    if other is not None:
        return find(place), find(other)
    first, second = steps
    return find(place, first), find(place, second)


def _facts(manifest: Manifest) -> dict[str, str]:
    known = manifest.provenance
    facts = {
        "step": str(manifest.step),
        "committed": moment_text(manifest.created) or "",
        "ranks": str(manifest.world_size),
        "parent": "" if known.parent is None else known.parent.name,
        "run id": known.run_id,
        "code": code_text(known),
        "data": data_text(known.data),
        "configured": known.configuration_sha256,
        "lineage": manifest.lineage.id,
    }
    for kind, named in (("metric", manifest.metrics), ("annotation", manifest.annotations)):
        facts |= {f"{kind} {name}": repr(value) for name, value in sorted(named.items())}
    return facts | {f"version of {name}": text for name, text in sorted(manifest.producer.items())}


def _form(form: SavedTensor | None) -> dict[str, Any] | None:
    return None if form is None else {"shape": form.shape, "dtype": form.dtype}


def _parts(found: Comparison) -> Iterator[str | Table]:
    rows: list[tuple[str, ...]] = []
    for each in found.tensors:
        a, b = (
            form and f"{form.dtype} {'x'.join(map(str, form.shape)) or 'scalar'}" for form in (each.a, each.b)
        )
        what = {"added": f"only in b: {b}", "removed": f"only in a: {a}", "content": f"content: {a}"}
        changed = "" if each.changed is None else f"{each.changed:,}"
        figures = ("" if one is None else f"{one:.6g}" for one in (each.max_abs, each.relative_norm))
        rows.append(
            (each.name, what.get(each.difference, f"{each.difference}: {a} -> {b}"), changed, *figures)
        )
    if rows:
        yield ""
        yield Table(columns=("TENSOR", "DIFFERENCE", "CHANGED", "MAX ABS", "RELATIVE NORM"), rows=rows)
    if found.values:
        yield ""
        values = [(each.name, each.a or "-", each.b or "-") for each in found.values]
        yield Table(columns=("VALUE", "A", "B"), rows=values)
    if rows or found.values:
        yield ""


def _summary(found: Comparison) -> str:
    counts = f"{len(found.tensors)} of {found.num_tensors} tensors, and {len(found.values)} values"
    if found.undecided:
        return (
            f"{counts} differ; not compared, because they are made of other tensors "
            f"and divided otherwise: {', '.join(found.undecided)}"
        )
    if found.equal:
        return f"equal: {found.num_tensors} tensors, {found.num_read} of them read, and all values"
    return f"different: {counts}; {found.num_read} tensors were read"
