"""The manifest of a checkpoint, and the marker that commits it.

The manifest lists every file with its checksum. The marker holds the manifest's digest and the few facts that
a listing needs, so that a run with a thousand checkpoints is listed without reading a manifest. A checksum of
its own protects it, because retention and resume act on it alone. Both are read as hostile input: paths and
sizes are checked before use.

A lineage is an unbroken line of saves. A save that continues from the newest checkpoint continues its
lineage. A fresh start, or a save after a return to an older checkpoint, begins a new one, which records its
ancestry. The lineage with the highest number is the present one: numbers decide, because clocks cannot be
trusted.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any, Final, Literal, TypeAlias, cast, final, get_args

from ckpt_core.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    PartialCheckpointError,
    damaged,
)
from ckpt_core.formats import codec
from ckpt_core.formats.checksums import is_checksum
from ckpt_core.formats.codec import count, file_paths
from ckpt_core.names import EVERY_GROUP, FORMAT_VERSION, MANIFEST, MARKER, twin_name
from ckpt_core.provenance import parent_fields, provenance_fields, read_parent, read_provenance
from ckpt_core.storage import Storage, read_intact, read_small
from ckpt_core.types import CheckpointInfo, FileEntry, Lineage, Parent, Provenance

MAX_ANCESTORS: Final = 1000
"""Older ancestors count as abandoned. The bound keeps markers fast to read."""

_last_begun = attrgetter("lineage.number", "created", "lineage.id")
_ID: Final = re.compile(r"[0-9a-f]{8,32}")


def on_present_line(infos: Sequence[CheckpointInfo], present: Lineage | None = None) -> list[CheckpointInfo]:
    """Return the checkpoints with `abandoned` set, oldest step first.

    Within one step, abandoned ones come first, and the lineage begun last comes last.
    """
    present = present_lineage(infos) if present is None else present
    limits = present.limits()
    judged = [
        info if info.abandoned is abandoned else replace(info, abandoned=abandoned)
        for info in infos
        for abandoned in (info.step > limits.get(info.lineage.id, -1),)
    ]
    return sorted(judged, key=by_step)


def present_lineage(infos: Sequence[CheckpointInfo], others: Sequence[Lineage] = ()) -> Lineage:
    """Return the lineage with the highest number; of several, the one saved to last.

    `others` are those of checkpoints whose markers cannot be read: if the newest checkpoint is damaged, an
    older run must not count as the present one, or a resume would continue what was abandoned.
    """
    found = [(lineage.number, 0.0, lineage.id, lineage) for lineage in others]
    if infos:
        last = max(infos, key=_last_begun)
        found.append((*_last_begun(last), last.lineage))
    return max(found, key=lambda each: each[:3])[3] if found else Lineage()


def next_lineage(
    infos: Sequence[CheckpointInfo],
    present: Lineage,
    origin: CheckpointInfo | None,
    step: int,
    *,
    branch: bool = False,
) -> tuple[Lineage, bool]:
    """Return the lineage of a save continuing from `origin`, and whether it is new.

    `infos` are all committed checkpoints of the root; `origin` is None if the state is from none of them. If
    `step` is before that of its origin, the checkpoints between them are abandoned. With `branch` it is new
    although it continues the newest, which stays on the line.
    """
    new = Lineage(id=secrets.token_hex(4), number=present.number + 1)
    if origin is None:
        return new, True
    line = [info for info in on_present_line(infos, present) if not info.abandoned]
    continues = bool(line) and is_same(line[-1], origin) and step >= origin.step
    if continues and not branch and origin.lineage == present and present.number:
        return present, False
    last = origin.step if step >= origin.step else step - 1
    older = ((origin.lineage.id, last), *((each, min(end, last)) for each, end in origin.lineage.ancestry))
    ancestry = tuple(
        (each, end)
        for each, end in older[:MAX_ANCESTORS]
        if any(info.lineage.id == each and info.step <= end for info in infos)
    )
    return replace(new, ancestry=ancestry), not continues


def is_same(one: CheckpointInfo, other: CheckpointInfo) -> bool:
    """Return whether both are the same checkpoint, not one replaced by the other."""
    return (one.name, one.save_id, one.created) == (other.name, other.save_id, other.created)


def _lineage_of(fields: codec.Fields) -> Lineage:
    found = fields.optional("lineage")
    if found is None:
        return Lineage()
    ancestry = found.get("ancestry", list)
    if len(ancestry) > MAX_ANCESTORS or any(type(pair) is not list or len(pair) != 2 for pair in ancestry):
        raise ValueError(f"'ancestry' should be at most {MAX_ANCESTORS} pairs of lineage and step")
    return Lineage(
        id=_id(found.get("id", str)),
        number=found.count("number", least=1),
        ancestry=tuple(
            ("" if each == "" else _id(each), codec.count(step, "step")) for each, step in ancestry
        ),
    )


def _id(value: object) -> str:
    if type(value) is not str or not _ID.fullmatch(value):
        raise ValueError(f"an id should be 8 to 32 lower-case hex digits, not {value!r:.80}")
    return value


def by_step(info: CheckpointInfo) -> tuple[int, bool, int, float]:
    return info.step, not info.abandoned, info.lineage.number, info.created


_COLUMNS: Final = ("path", "size_bytes", "checksum")


def join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory and name else directory or name


def _check_columns(columns: dict[str, Any]) -> None:
    """Raise ValueError if one of the files has a bad path, size or checksum."""
    lengths = {len(columns[name]) if type(columns.get(name)) is list else -1 for name in _COLUMNS}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError("'files' should hold columns of equal length")
    paths, sizes, checksums = (columns[name] for name in _COLUMNS)
    file_paths(paths)
    if not {int}.issuperset(map(type, sizes)):
        raise ValueError("the size of a file should be an integer")
    count(min(sizes, default=0), "size")
    count(max(sizes, default=0), "size")
    if not {str}.issuperset(map(type, checksums)) or not all(map(is_checksum, checksums)):
        raise ValueError("the checksum of a file should be `<algorithm>:<hex>`")


ItemKind: TypeAlias = Literal["sharded", "per_rank", "shared", "files"]
"""How an item is stored: see `state`; "files" are files of a host framework, unchanged."""

MAX_MARKER_BYTES: Final = 1 << 20
"""A larger file is no marker, and must not be read into memory by a listing."""

MAX_MANIFEST_BYTES: Final = 64 << 20
"""Enough for 400,000 files; a larger manifest is neither read nor written."""

NEWEST_FORMAT: Final = FORMAT_VERSION + 1
"""Of a checkpoint on several disks, or a compressed one. A reader that does not know them must refuse them:
it would take files for lost or damaged. All others have the `FORMAT_VERSION`."""
_MARKER: Final = "the commit marker"
_KINDS: Final = frozenset(get_args(ItemKind))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """What a manifest and its marker both hold; as in `CheckpointInfo`."""

    save_id: str
    step: int
    created: float
    world_size: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    lineage: Lineage = field(default_factory=Lineage)
    plain_sha256: str = ""
    epochs: int | None = None
    total_steps: int | None = None
    weights_of: Parent | None = None
    format_version: int = FORMAT_VERSION


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(_Facts):
    """The full contents list of a committed checkpoint.

    Attributes:
        save_id: the id of the save that wrote it, also in the name of its working directory.
        created: Unix time in seconds.
        items: item -> how it is stored.
        metrics: numbers for `KeepBest`; they may be NaN.
        annotations: data of the user; plain JSON.
        producer: name -> version of the software that wrote it (ckpt_suite, torch, python, framework).
        files: every file of the directory but the manifest and the marker.
        num_chunks: number of tensor shards and byte entries in those files; the chunk tables locate them.
        replicas: number of files that hold the same bytes; 2 if every file has a twin (`twin_name`).
        groups: of each file, in order, the filesystem group on whose disk it is, `EVERY_GROUP` if on all of
            them; empty if all files are in one place. Copies of the checkpoint in one place keep it.
        plain_sha256: SHA-256 of the manifest of the plain checkpoint that it holds compressed; "" for none.

    The rest is as in `CheckpointInfo`.
    """

    items: Mapping[str, ItemKind] = field(default_factory=dict[str, ItemKind])
    annotations: Mapping[str, Any] = field(default_factory=dict[str, Any])
    producer: Mapping[str, str] = field(default_factory=dict[str, str])
    files: tuple[FileEntry, ...] = ()
    num_chunks: int = 0
    provenance: Provenance = field(default_factory=Provenance)
    replicas: int = 1
    groups: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    @property
    def directories(self) -> list[str]:
        """The directories of its files, parents first; "" is the checkpoint's own."""
        holders = {entry.path.rpartition("/")[0] for entry in self.files}
        parents = {str(parent) for holder in holders for parent in PurePosixPath(holder).parents}
        return sorted({""} | holders | (parents - {"."}))

    def is_everywhere(self, path: str) -> bool:
        """Return whether each of several disks has a copy of a file."""
        pairs = zip(self.files, self.groups, strict=False)
        return any(entry.path == path and group == EVERY_GROUP for entry, group in pairs)

    def twins(self) -> Mapping[str, FileEntry]:
        entries = {entry.path: entry for entry in self.files} if self.replicas > 1 else {}
        return {path: entries[twin_name(path)] for path in entries if twin_name(path) in entries}

    @property
    def originals(self) -> Sequence[FileEntry]:
        twins = {entry.path for entry in self.twins().values()}
        return [entry for entry in self.files if entry.path not in twins] if twins else self.files

    def to_bytes(self) -> bytes:
        content = codec.encode(
            {
                "format_version": self.format_version,
                "save_id": self.save_id,
                "step": self.step,
                "created": self.created,
                "world_size": self.world_size,
                "items": dict(self.items),
                "metrics": codec.numbers(self.metrics),
                "annotations": dict(self.annotations),
                "producer": dict(self.producer),
                "num_chunks": self.num_chunks,
                **_rest_fields(self),
                **provenance_fields(self.provenance),
                **({"replicas": self.replicas} if self.replicas > 1 else {}),
                **({"groups": list(self.groups)} if self.groups else {}),
                "files": {name: list(map(attrgetter(name), self.files)) for name in _COLUMNS},
            }
        )
        if len(content) > MAX_MANIFEST_BYTES:
            raise ConfigError(
                f"the manifest of step {self.step} would have {len(content)} bytes, more than the "
                f"limit of {MAX_MANIFEST_BYTES}: keep annotations short, or save with fewer files"
            )
        return content

    @classmethod
    def read(cls, storage: Storage, directory: str) -> Manifest:
        return cls.from_bytes(read_small(storage, f"{directory}/{MANIFEST}", MAX_MANIFEST_BYTES))

    @classmethod
    def from_bytes(cls, content: bytes, *, with_files: bool = True) -> Manifest:
        with codec.Fields.parse(
            content, source=MANIFEST, oldest=FORMAT_VERSION, newest=NEWEST_FORMAT
        ) as fields:
            columns = fields.get("files", dict)
            _check_columns(columns)
            rows = zip(*(columns[name] for name in _COLUMNS), strict=True) if with_files else ()
            return cls(
                **_facts_in(fields),
                items=_kinds(fields.mapping("items", str)),
                annotations=fields.get("annotations", dict),
                producer=fields.mapping("producer", str),
                num_chunks=fields.count("num_chunks"),
                provenance=read_provenance(fields),
                replicas=fields.count("replicas", least=1) if "replicas" in fields else 1,
                groups=_groups(fields, len(columns["path"])),
                files=tuple(
                    FileEntry(path=path, size_bytes=size, checksum=sum_) for path, size, sum_ in rows
                ),
            )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Marker(_Facts):
    """The content of `COMMITTED`: the manifest's digest, and the facts of a listing.

    With several `groups`, the directories of that name on all their disks make up the checkpoint.
    """

    manifest_sha256: str
    manifest_bytes: int
    size_bytes: int
    groups: int = 1

    @classmethod
    def of(cls, manifest: Manifest, content: bytes, *, groups: int = 1) -> Marker:
        """Build the marker of a manifest: its bytes are `content`, on so many disks."""
        return cls(
            manifest_sha256=hashlib.sha256(content).hexdigest(),
            manifest_bytes=len(content),
            groups=groups,
            format_version=manifest.format_version if groups == 1 else NEWEST_FORMAT,
            **_facts_of(manifest),
        )

    @classmethod
    def read(cls, storage: Storage, directory: str) -> Marker:
        def damage(content: bytes) -> str:
            try:
                cls.from_bytes(content)
            except CorruptCheckpointError as error:
                return str(error)
            except IncompatibleCheckpointError:
                pass
            return ""

        key = f"{directory}/{MARKER}"
        content, _ = read_intact(storage, key, lambda each: read_small(each, key, MAX_MARKER_BYTES), damage)
        return cls.from_bytes(content)

    def matches(self, content: bytes) -> bool:
        """Return whether `content` is the committed manifest, bit for bit."""
        if len(content) != self.manifest_bytes:
            return False
        return hashlib.sha256(content).hexdigest() == self.manifest_sha256

    def is_same(self, manifest: Manifest, content: bytes) -> bool:
        """Return whether both are of one checkpoint, be either compressed."""
        own = self.plain_sha256 or self.manifest_sha256
        return own == (manifest.plain_sha256 or hashlib.sha256(content).hexdigest())

    def is_of(self, manifest: Manifest) -> bool:
        """Return whether the facts in the marker agree with its manifest."""
        own, other = (
            {**_facts_of(each), "metrics": codec.numbers(each.metrics)} for each in (self, manifest)
        )
        return own == other

    def info(self, name: str) -> CheckpointInfo:
        """Build the `CheckpointInfo` of directory `name`, without pins and marks."""
        return CheckpointInfo(name=name, manifest_sha256=self.manifest_sha256, **_facts_of(self))

    def to_bytes(self) -> bytes:
        facts = codec.encode(
            {
                "format_version": self.format_version,
                "manifest_sha256": self.manifest_sha256,
                "manifest_bytes": self.manifest_bytes,
                "save_id": self.save_id,
                "step": self.step,
                "created": self.created,
                "size_bytes": self.size_bytes,
                "world_size": self.world_size,
                "metrics": codec.numbers(self.metrics),
                **_rest_fields(self),
                **({"groups": self.groups} if self.groups > 1 else {}),
            }
        )
        content = codec.add_checksum(facts)
        if len(content) > MAX_MARKER_BYTES:
            raise ConfigError(f"{len(self.metrics)} metrics are too many for a commit marker; keep a few")
        return content

    @classmethod
    def from_bytes(cls, content: bytes) -> Marker:
        with codec.Fields.parse(
            content, source=_MARKER, oldest=FORMAT_VERSION, newest=NEWEST_FORMAT, summed=True
        ) as fields:
            return cls(
                **_facts_in(fields),
                manifest_sha256=fields.get("manifest_sha256", str),
                manifest_bytes=fields.count("manifest_bytes"),
                size_bytes=fields.count("size_bytes"),
                groups=fields.count("groups", least=1) if "groups" in fields else 1,
            )


_COUNTS: Final = ("epochs", "total_steps")
_FACTS: Final = ("size_bytes", *(each.name for each in fields_of(_Facts) if each.name != "format_version"))


def _facts_of(source: Manifest | Marker) -> dict[str, Any]:
    return {name: getattr(source, name) for name in _FACTS}


def _rest_fields(source: Manifest | Marker) -> dict[str, Any]:
    """Return the fields of both that a checkpoint need not have."""
    origin, lineage, fields = source.weights_of, source.lineage, dict[str, Any]()
    if lineage.number:
        ancestry = [[each, step] for each, step in lineage.ancestry]
        fields["lineage"] = {"id": lineage.id, "number": lineage.number, "ancestry": ancestry}
    fields |= {name: known for name in _COUNTS if (known := getattr(source, name)) is not None}
    fields |= {} if origin is None else {"weights_of": parent_fields(origin)}
    return fields | ({"plain_sha256": source.plain_sha256} if source.plain_sha256 else {})


def _facts_in(fields: codec.Fields) -> dict[str, Any]:
    return {
        "format_version": fields.format_version,
        "save_id": _id(fields.get("save_id", str)),
        "step": fields.count("step"),
        "created": fields.number("created"),
        "world_size": fields.count("world_size", least=1),
        "metrics": fields.numbers("metrics"),
        "lineage": _lineage_of(fields),
        "plain_sha256": fields.get("plain_sha256", str) if "plain_sha256" in fields else "",
        "weights_of": None if (origin := fields.optional("weights_of")) is None else read_parent(origin),
        **{name: fields.count(name) for name in _COUNTS if name in fields},
    }


def read_committed(
    storage: Storage, name: str, marker: Marker
) -> tuple[bytes, CorruptCheckpointError | None]:
    """Read the manifest that a marker names, or its twin, then with the damage."""
    try:
        return _named_by(marker, storage, name, MANIFEST), None
    except CorruptCheckpointError as damage:
        try:
            return _named_by(marker, storage, name, twin_name(MANIFEST)), damage
        except CorruptCheckpointError:
            raise damage from None


def whole_info(storage: Storage, name: str, marker: Marker) -> CheckpointInfo:
    """Return the checkpoint of a marker.

    Where only some files of a disk are missing, they are lost, which a verification finds.

    Raises:
        PartialCheckpointError: all files of one of its disks are elsewhere, and so are their twins.
        CorruptCheckpointError: it is on several disks, and its manifest is damaged.
    """
    if marker.groups == 1:
        return marker.info(name)
    manifest = Manifest.from_bytes(read_committed(storage, name, marker)[0])
    groups = {entry.path: group for entry, group in zip(manifest.files, manifest.groups, strict=False)}
    there = {
        join(inner, child.name)
        for inner in {entry.path.rpartition("/")[0] for entry in manifest.files}
        for child in storage.list(join(name, inner))
    }
    twins = manifest.twins()
    missing = [
        entry.path
        for entry in manifest.originals
        if entry.path not in there and (entry.path not in twins or twins[entry.path].path not in there)
    ]
    held = {group for path, group in groups.items() if path in there} - {EVERY_GROUP}
    lacking = {groups.get(path, EVERY_GROUP) for path in missing} - {EVERY_GROUP} - held
    if lacking:
        raise PartialCheckpointError(
            f"part of a checkpoint on the disks of {marker.groups} nodes: here are the files of disk "
            f"{_numbers(held)}, and not those of disk {_numbers(lacking)} ({len(missing)} of "
            f"{len(manifest.originals)} files)",
            lacking=tuple(sorted(lacking)),
        )
    return marker.info(name)


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"


def _named_by(marker: Marker, storage: Storage, name: str, path: str) -> bytes:
    other = f"not the file that was committed: its digest differs from {MARKER}'s"
    key, most = f"{name}/{path}", min(marker.manifest_bytes, MAX_MANIFEST_BYTES)
    try:
        content, problem = read_intact(
            storage,
            key,
            lambda each: read_small(each, key, most),
            lambda content: "" if marker.matches(content) else other,
        )
    except FileNotFoundError:
        problem, content = "missing", b""
    if problem:
        raise damaged(f"{storage.url}/{name}", path, problem)
    return content


def lineage_in_manifest(storage: Storage, name: str) -> Lineage | None:
    """Return the lineage in the manifest of a checkpoint with an unreadable marker."""
    try:
        return Manifest.read(storage, name).lineage
    except (CheckpointError, OSError):
        return None


def _groups(fields: codec.Fields, files: int) -> tuple[int, ...]:
    groups = fields.get("groups", list) if "groups" in fields else []
    if groups and len(groups) != files:
        raise ValueError(f"'groups' should have an entry for each of {files} files, not {len(groups)}")
    if not {int}.issuperset(map(type, groups)) or min(groups, default=0) < EVERY_GROUP:
        raise ValueError("'groups' should hold numbers of groups")
    return tuple(groups)


def _kinds(items: dict[str, str]) -> dict[str, ItemKind]:
    foreign = {name: kind for name, kind in items.items() if kind not in _KINDS}
    if foreign:
        raise ValueError(f"items {foreign} are stored in an unknown way")
    return cast("dict[str, ItemKind]", items)
