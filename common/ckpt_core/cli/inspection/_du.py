"""`du`: what takes the space of a root, by lineage and by item."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_core.cli._arguments import named_checkpoint, none_committed, open_root
from ckpt_core.cli._outcome import Outcome, Table
from ckpt_core.commit import Catalog, list_tensors
from ckpt_core.errors import CheckpointError
from ckpt_core.names import METADATA, is_incomplete, is_replaced, is_trash
from ckpt_core.options import bytes_text
from ckpt_core.storage import Storage, read_small
from ckpt_core.types import CheckpointInfo


def run(arguments: Namespace) -> Outcome:
    named = named_checkpoint(arguments.place, arguments.storage_options)
    storage = open_root(arguments.place, arguments.storage_options) if named is None else named[0]
    infos = [info for info in Catalog(storage).survey().everything if named is None or info.name == named[1]]
    left = {
        entry.name: storage.bytes_below(entry.name)
        for entry in (storage.list("") if named is None else ())
        # Torn saves, begun prunes, and what was moved aside.
        if entry.is_directory and any(is_so(entry.name) for is_so in (is_incomplete, is_trash, is_replaced))
    }
    if not infos and not left:
        raise none_committed(storage)
    lineages, items, states = _by_lineage(infos), _by_item(storage, infos), _by_state(infos)
    total = sum(info.size_bytes for info in infos) + sum(left.values())
    return Outcome(
        fields={
            "root": storage.url,
            "size_bytes": total,
            "lineages": lineages,
            "items": [{"item": item, "size_bytes": size} for item, size in items.items()],
            "states": states,
            "left_over": [{"name": name, "size_bytes": size} for name, size in left.items()],
        },
        parts=[
            *(_tables(lineages, items, states) if infos else ()),
            *(f"left over: {name}, {bytes_text(size)}" for name, size in left.items()),
            f"{bytes_text(total)} in {storage.url}",
        ],
    )


def _by_lineage(infos: Sequence[CheckpointInfo]) -> list[dict[str, Any]]:
    found: dict[str, list[CheckpointInfo]] = defaultdict(list)
    for info in infos:
        found[info.lineage.id].append(info)
    return [
        {
            "lineage": own[0].lineage.number,
            "id": identity,
            "first_step": min(info.step for info in own),
            "last_step": max(info.step for info in own),
            **_sums(own),
        }
        for identity, own in found.items()
    ]


def _by_state(infos: Sequence[CheckpointInfo]) -> list[dict[str, Any]]:
    states = {
        "usable": [i for i in infos if i.usable and not i.abandoned],
        "abandoned": [i for i in infos if i.usable and i.abandoned],
        "weights": [i for i in infos if i.weights_of is not None and not i.marked],
        "damaged": [i for i in infos if i.damaged is not None],
        "bad": [i for i in infos if i.bad is not None and i.damaged is None],
        "pinned": [i for i in infos if i.pinned is not None],
    }
    return [{"state": state, **_sums(own)} for state, own in states.items() if own]


def _sums(own: Sequence[CheckpointInfo]) -> dict[str, int]:
    return {"checkpoints": len(own), "size_bytes": sum(info.size_bytes for info in own)}


def _by_item(storage: Storage, infos: Sequence[CheckpointInfo]) -> dict[str, int]:
    """Return the bytes of tensors by item, over all checkpoints; the rest is "other"."""
    found: dict[str, int] = defaultdict(int)
    for info in infos:
        key, rest = f"{info.name}/{METADATA}", info.size_bytes
        try:
            entries = list_tensors(read_small(storage, key), f"{storage.url}/{key}")
        except (CheckpointError, OSError):
            entries = []  # an index that is gone or damaged: `ckpt verify` says so
        for entry in entries:
            found[entry.name.partition(".")[0]] += entry.size_bytes
            rest -= entry.size_bytes
        found["other"] += max(0, rest)
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def _tables(
    lineages: Sequence[Mapping[str, Any]], items: Mapping[str, int], states: Sequence[Mapping[str, Any]]
) -> Iterator[str | Table]:
    columns = ("LINEAGE", "STEPS", "CHECKPOINTS", "SIZE")
    rows = [(str(e["lineage"]), f"{e['first_step']:,} - {e['last_step']:,}", *_counts(e)) for e in lineages]
    yield Table(columns=columns, rows=rows, figures=1)
    yield ""
    by_item = [(item, bytes_text(size)) for item, size in items.items()]
    yield Table(columns=("ITEM", "SIZE"), rows=by_item, figures=1)
    yield ""
    by_state = [(each["state"], *_counts(each)) for each in states]
    yield Table(columns=("STATE", "CHECKPOINTS", "SIZE"), rows=by_state, figures=1)


def _counts(each: Mapping[str, Any]) -> tuple[str, str]:
    return f"{each['checkpoints']:,}", bytes_text(each["size_bytes"])
