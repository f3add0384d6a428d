"""What processes of exports do: write checkpoints as others do, or weights.

The directory of an export belongs to one checkpoint. `exports.json` in the place lists what was begun, and is
written again when that is whole: what is listed as unfinished counts for nothing, and is removed by the next
export. What is not listed is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

from ckpt_core.errors import CheckpointError, CheckpointExistsError, CorruptCheckpointError, failure_text
from ckpt_core.formats import codec
from ckpt_core.messages import message
from ckpt_core.names import FORMAT_VERSION, export_draft, parse_step_name, step_name
from ckpt_core.storage import Storage, open_storage, read_small
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import imported

EXPORTS: Final = "exports.json"
"""The file of a place that lists its exports."""
_MAX_BYTES: Final = 1 << 20


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ExportTerms:
    """The root, the place that exports are written below, and how many stay there.

    `writer` is "package.module:function" that writes one, as `ckpt_core.export` does, and `words` are its
    arguments, but for the options of storages.
    """

    source: str
    source_options: Mapping[str, object]
    place: str
    place_options: Mapping[str, object]
    keep: int | None
    writer: str
    words: Mapping[str, object]


def exporting(terms: ExportTerms) -> Callable[[CheckpointInfo, Callable[[int], None]], None]:
    """Open the place; return what exports a checkpoint of the root; see `serve`."""
    place = open_storage(terms.place, terms.place_options)

    def export(info: CheckpointInfo, progress: Callable[[int], None]) -> None:
        del progress
        name, (whole, begun) = step_name(info.step), read_exports(place)
        if whole.get(name) == info.save_id:
            return
        _require_free(place, name, whole | begun)
        gone = [each for each, save_id in begun.items() if (each, save_id) != (name, info.save_id)]
        if name in whole:  # of a lineage that went back
            gone.append(name)
            _write(place, whole, begun | {name: whole.pop(name)})
        for each in gone:
            place.delete(each)
            place.delete(export_draft(each))
        _write(place, whole, {name: info.save_id})
        with _as_ours():
            imported("export", terms.writer)(
                f"{terms.source}/{info.name}",
                f"{terms.place}/{name}",
                storage_options=terms.source_options,
                out_storage_options=terms.place_options,
                **terms.words,
            )
        whole[name] = info.save_id
        begun = {each: whole.pop(each) for each in list(whole)[: -terms.keep]} if terms.keep else {}
        _write(place, whole, begun)
        for each in begun:
            place.delete(each)

    return export


@contextmanager
def _as_ours() -> Generator[None]:
    """Make errors of a user's weights and formats such as the process tells."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(failure_text(error)) from error


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class DemotionTerms:
    """The root of what becomes weights, its options, and the function that writes."""

    source: str
    options: Mapping[str, object]
    writer: str


def demoting(
    terms: DemotionTerms,
) -> Callable[[tuple[CheckpointInfo, str | None], Callable[[int], None]], None]:
    """Open a root; return what writes the weights of a checkpoint there; see `serve`."""
    storage = open_storage(terms.source, terms.options)

    def demote(task: tuple[CheckpointInfo, str | None], progress: Callable[[int], None]) -> None:
        del progress
        with _as_ours():
            imported("keep", terms.writer)(storage, *task)

    return demote


def read_exports(place: Storage) -> tuple[dict[str, str], dict[str, str]]:
    """Read which exports a place has: directory -> id of the save.

    Returns:
        What is whole, in the order in which it came, and what was begun and counts for nothing.

    Raises:
        CorruptCheckpointError: the list is malformed, or has changed since it was written.
        IncompatibleCheckpointError: it was written by a newer version.
        OSError: it cannot be read.
    """
    try:
        content = read_small(place, EXPORTS, _MAX_BYTES)
    except FileNotFoundError:
        return {}, {}
    source = f"{place.url}/{EXPORTS}"
    if not codec.has_checksum(content, source=source):
        raise CorruptCheckpointError(f"{source} is no list of exports: move it away, or export elsewhere")
    with codec.Fields.parse(content, source=source) as fields:
        whole, begun = fields.mapping("whole", str), fields.mapping("begun", str)
        if odd := [name for name in (*whole, *begun) if parse_step_name(name) is None]:
            raise ValueError(f"{odd[0]!r} is no name of an export")
        return whole, begun


def _require_free(place: Storage, name: str, listed: Collection[str]) -> None:
    """Refuse the name of what somebody else has there: what is listed may be deleted.

    Raises:
        CheckpointExistsError: it is a file, or a directory with something in it.
    """
    entry = place.entry(name)
    is_file = entry is not None and not entry.is_directory
    if name not in listed and (is_file or place.list(name)):
        raise CheckpointExistsError(
            f"{place.url}/{name} is there already, and is no export of ours; nothing was written: move it "
            "away, or export elsewhere"
        )


def _write(place: Storage, whole: Mapping[str, str], begun: Mapping[str, str]) -> None:
    fields = {"format_version": FORMAT_VERSION, "whole": dict(whole), "begun": dict(begun)}
    place.replace(EXPORTS, codec.add_checksum(codec.encode(fields)))
