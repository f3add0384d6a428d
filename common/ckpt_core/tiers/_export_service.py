"""What the process of exports does: it writes checkpoints in a format of others.

The directory of an export belongs to one checkpoint. `exports.json` in the place lists what was begun, and is
written again when that is whole: what is listed as unfinished counts for nothing, and is removed by the next
export. What is not listed is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, final

from ckpt_core.errors import CheckpointError, CorruptCheckpointError, failure_text
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
    """What exports are made of, how, and where.

    Attributes:
        source: directory or URL of the root.
        source_options: of its storage.
        place: directory or URL that exports are written below.
        place_options: of its storage.
        keep: how many exports stay; None for all.
        writer: "package.module:function" that writes one, as `ckpt_core.export` does.
        words: its keyword arguments, but for the options of storages.
    """

    source: str
    source_options: Mapping[str, object]
    place: str
    place_options: Mapping[str, object]
    keep: int | None
    writer: str
    words: Mapping[str, object]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """An export that is in a place, or was begun there.

    Attributes:
        name: of its directory.
        save_id: of the checkpoint.
        whole: whether it is there, and counts.
    """

    name: str
    save_id: str
    whole: bool


def exporting(terms: ExportTerms) -> Callable[[CheckpointInfo, Callable[[int], None]], None]:
    """Open the place; return what exports a checkpoint of the root; see `serve`."""
    place = open_storage(terms.place, terms.place_options)

    def export(info: CheckpointInfo, progress: Callable[[int], None]) -> None:
        del progress
        known = read_exports(place)
        mine = Exported(name=step_name(info.step), save_id=info.save_id, whole=True)
        if mine in known:
            return
        begun = replace(mine, whole=False)
        whole = [each for each in known if each.whole and each.name != mine.name]
        gone = [each for each in known if each not in {begun, *whole}]
        if any(each.whole for each in gone):  # of a lineage that went back
            _write(place, [*whole, *(replace(each, whole=False) for each in gone)])
        for each in gone:
            place.delete(each.name)
            place.delete(export_draft(each.name))
        _write(place, [*whole, begun])
        try:
            imported("export", terms.writer)(
                f"{terms.source}/{info.name}",
                f"{terms.place}/{mine.name}",
                storage_options=terms.source_options,
                out_storage_options=terms.place_options,
                **terms.words,
            )
        except (CheckpointError, OSError):
            raise
        except Exception as error:
            raise CheckpointError(failure_text(error)) from error
        whole.append(mine)
        drop = whole[: -terms.keep] if terms.keep else []
        _write(place, [replace(each, whole=each not in drop) for each in whole])
        for each in drop:
            place.delete(each.name)

    return export


def read_exports(place: Storage) -> list[Exported]:
    """Read which exports a place has, in the order in which they came.

    Raises:
        CorruptCheckpointError: the list is malformed, or has changed since it was written.
        IncompatibleCheckpointError: it was written by a newer version.
        OSError: it cannot be read.
    """
    try:
        content = read_small(place, EXPORTS, _MAX_BYTES)
    except FileNotFoundError:
        return []
    source = f"{place.url}/{EXPORTS}"
    if not codec.has_checksum(content, source=source):
        raise CorruptCheckpointError(f"{source} is no list of exports: move it away, or export elsewhere")
    with codec.Fields.parse(content, source=source) as fields:
        return [_exported(each) for each in fields.objects("exports")]


def _write(place: Storage, exports: Sequence[Exported]) -> None:
    fields = {"format_version": FORMAT_VERSION, "exports": [asdict(each) for each in exports]}
    place.replace(EXPORTS, codec.add_checksum(codec.encode(fields)))


def _exported(fields: codec.Fields) -> Exported:
    name = fields.get("name", str)
    if parse_step_name(name) is None:
        raise ValueError(f"{name!r} is no name of an export")
    return Exported(name=name, save_id=fields.get("save_id", str), whole=fields.get("whole", bool))
