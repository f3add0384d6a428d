"""Value types of several layers, which need not import each other for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias

StateDict: TypeAlias = Mapping[str, Any]
"""Nested mapping whose leaves are tensors (of any kind DCP accepts) or plain Python values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint, as listed in the manifest.

    `path` is POSIX-relative to the checkpoint directory; `checksum` is `<algorithm>:<hex>`.
    """

    path: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkEntry:
    """One chunk: the contiguous bytes of a tensor shard or byte entry in a data file.

    `offset` and `size_bytes` delimit the whole torch zip; `payload_offset` is the start of the raw tensor
    bytes in the file (None for byte entries). `key` is DCP's flattened name; `shard_offsets` is the start of
    the shard in the global tensor.

    `crc32` is of the payload, for byte entries of the whole entry. `block_crcs` are the CRC-32s of every
    `block_bytes` of a payload that is larger than that, so that a part of it can be verified; else empty.
    """

    path: str
    key: str
    shard_offsets: tuple[int, ...] | None
    offset: int
    size_bytes: int
    crc32: int
    payload_offset: int | None = None
    payload_bytes: int | None = None
    dtype: str | None = None
    block_bytes: int = 1 << 20
    block_crcs: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The unbroken line of saves of a checkpoint, and the lines that it continues.

    Attributes:
        id: hex digits; "" of an empty root.
        number: one more than that of any lineage begun before it in the same root; 0 of an empty one.
        ancestry: (id of a lineage, highest step of it that this one continues), nearest first.
    """

    id: str = ""
    number: int = 0
    ancestry: tuple[tuple[str, int], ...] = ()

    def includes(self, lineage: Lineage, step: int) -> bool:
        """Return whether this lineage includes or continues a checkpoint of `lineage`."""
        return step <= self.limits().get(lineage.id, -1)

    def limits(self) -> dict[str, float]:
        """Map this lineage, and each that it continues, to the highest step that counts."""
        limits: dict[str, float] = {}
        for ancestor, last in self.ancestry:
            limits[ancestor] = max(last, limits.get(ancestor, last))
        limits[self.id] = math.inf
        return limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Parent:
    """The checkpoint whose state a save continues.

    It may lie `elsewhere`, in another root.
    """

    name: str
    step: int
    save_id: str
    manifest_sha256: str
    elsewhere: bool = False

    @classmethod
    def of(cls, info: CheckpointInfo) -> Parent:
        """Return a committed checkpoint as a parent."""
        return cls(name=info.name, step=info.step, save_id=info.save_id, manifest_sha256=info.manifest_sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint as listings and retention policies see it.

    Attributes:
        step: optimizer steps done.
        name: of its directory.
        created: Unix time in seconds.
        size_bytes: of its files.
        world_size: ranks that saved it.
        metrics: numbers given with the save.
        pinned: reason of its protection from pruning; None if it is not pinned.
        damaged: problem that a verification found; None if it is not marked as damaged. A checkpoint that was
            never verified is not marked.
        bad: reason not to train on it, in the words of its marker; None if it is not marked.
        lineage: the line of saves that it belongs to.
        abandoned: whether the root's present lineage does not continue it: training began afresh, or went
            back to an earlier checkpoint.
        save_id: of the save that wrote it.
        manifest_sha256: SHA-256 of its `manifest.json`, hexadecimal; it identifies its content as firmly as
            the checksums in the manifest do.
        plain_sha256: that of the plain checkpoint, if this is a compressed one; else "".
        epochs: epochs finished then; None if not known.
        total_steps: the length of the training as planned then, in steps; None if not known.
        weights_of: the whole checkpoint whose weights it holds, and nothing else of it; None if it is whole.
    """

    step: int
    name: str
    created: float
    size_bytes: int = 0
    world_size: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    pinned: str | None = None
    damaged: str | None = None
    bad: str | None = None
    lineage: Lineage = field(default_factory=Lineage)
    abandoned: bool = False
    save_id: str = ""
    manifest_sha256: str = ""
    plain_sha256: str = ""
    epochs: int | None = None
    total_steps: int | None = None
    weights_of: Parent | None = None

    @property
    def content_sha256(self) -> str:
        """The same for a plain checkpoint and for those made of it by compressing."""
        return self.plain_sha256 or self.manifest_sha256

    @property
    def marked(self) -> bool:
        """Whether it is marked as damaged or bad."""
        return self.damaged is not None or self.bad is not None

    @property
    def usable(self) -> bool:
        """Whether it may be resumed: it is not marked, and no mere weights."""
        return not self.marked and self.weights_of is None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPosition:
    """How far training is in an epoch, counted over all ranks; None where unknown.

    Attributes:
        epoch: its number, from 0.
        samples: trained on in it.
        of: samples in all of it.
    """

    epoch: int | None = None
    samples: int | None = None
    of: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a checkpoint comes from, as far as it is known.

    Attributes:
        parent: what its state continues; None for a training that began with it.
        run_id: the start of the job that saved it; every restart has another.
        code_version: the git commit of the code, or what the user has named; "" if unknown.
        code_dirty: whether files of that commit were changed; None if unknown.
        configuration_sha256: digest of the configuration; "" if unknown.
        data: name of a loader -> how far training was in it.
    """

    parent: Parent | None = None
    run_id: str = ""
    code_version: str = ""
    code_dirty: bool | None = None
    configuration_sha256: str = ""
    data: Mapping[str, DataPosition] = field(default_factory=dict[str, DataPosition])


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedState:
    """The training state of one rank at the moment of a save.

    Attributes:
        sharded: DCP part directory (POSIX-relative, "" for the checkpoint directory itself) -> nested state
            dict whose tensors are the live ones; they are copied by staging, not here.
        per_rank: item -> value, one per rank, never merged (RNG, data position).
        shared: item -> value, the same on every rank that has it; the lowest rank's is written.
        alike: the items of `shared` whose values are compared, as they must not differ between ranks.
        groups: (part, path) of lists of parameter groups that the source identifies by the names in them, so
            that ranks may have different ones.
        files: name -> content, extra files of a host framework; when ranks name the same file, the lowest
            rank's is written.
        in_files: name -> live tensor that only `files` hold, for `reject_non_finite`.
        local: (part, DCP's flattened key) -> live tensor, also in `sharded`, that is rank-local (module
            buffers such as batch-norm statistics). The lowest rank's value is the checkpoint's; ranks whose
            value differs save theirs, too, for an exact resume.
        stable: live tensors in `sharded` that change only in a step of one of `optimizers`, so that they may
            be copied while forward and backward run.
        optimizers: torch optimizers; their steps wait for pending copies.
        positions: name of a loader -> how far training is in it, for the manifest.
        configuration: returns the host's configuration, of which the manifest gets a digest; called once.
    """

    sharded: Mapping[str, StateDict] = field(default_factory=dict[str, StateDict])
    per_rank: Mapping[str, Any] = field(default_factory=dict[str, Any])
    shared: Mapping[str, Any] = field(default_factory=dict[str, Any])
    alike: Collection[str] = ()
    groups: Collection[tuple[str, tuple[str, ...]]] = ()
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    in_files: Mapping[str, Any] = field(default_factory=dict[str, Any])
    local: Mapping[tuple[str, str], Any] = field(default_factory=dict[tuple[str, str], Any])
    stable: Sequence[Any] = ()
    optimizers: Sequence[Any] = ()
    positions: Mapping[str, DataPosition] = field(default_factory=dict[str, DataPosition])
    configuration: Callable[[], Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A saved tensor: global shape and dtype (torch's name, e.g. `bfloat16`).

    `wrapped` says whether it is made of others; None if that is not known.
    """

    shape: tuple[int, ...]
    dtype: str
    wrapped: bool | None = None


SavedEntries: TypeAlias = Mapping[tuple[str | int, ...], "SavedTensor | None"]
"""Path of a leaf in the nested state dict -> its tensor description, or None for a plain Python value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """The content of a checkpoint, for one rank, without large data.

    Attributes:
        sharded: DCP part directory -> leaves.
        per_rank: this rank's values; empty if the checkpoint has none for it.
        shared: values that are the same on every rank.
        world_size: number of ranks that saved; None for a directory written by stock DCP.
        step: the step saved; None for a directory written by stock DCP.
        name: the checkpoint's directory name under its root.
        strict: whether every selected entry must fit; else entries that do not are skipped.
        include: patterns of selected entries, see `wants`; everything if empty.
        partial: whether it holds more than this rank has, because other ranks have the rest.
        left: descriptions of the entries skipped, because they do not fit, by a load that was not strict.
        matched: how many live entries were loaded.
        missing: live names that the checkpoint lacks, and that keep their values.
        unexpected: names in the checkpoint that no rank has.
        mismatched: names that differ in shape or dtype, and how.
        annotations: those given with the save.
    """

    sharded: Mapping[str, SavedEntries]
    per_rank: Mapping[str, Any]
    shared: Mapping[str, Any]
    world_size: int | None
    step: int | None
    name: str = ""
    strict: bool = True
    include: tuple[str, ...] = ()
    partial: bool = False
    left: Sequence[str] = ()
    matched: int = 0
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    mismatched: Sequence[str] = ()
    annotations: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def report(self) -> str:
        """What of the live state was loaded, with the first names of the rest."""
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "that differ": self.mismatched}
        parts = [f"{self.matched} matched", *(_counted(kind, names) for kind, names in kinds.items())]
        return "; ".join(parts)

    def wants(self, path: tuple[str | int, ...]) -> bool:
        """Return whether to load the live entry at `path`."""
        return matches_any(path, self.include)


_SHOWN: Final = 5


def _counted(kind: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{len(names)} {kind}" + (f": {shown}" if names else "") + (", …" if len(names) > _SHOWN else "")


def matches_any(path: tuple[str | int, ...], patterns: Collection[str], used: set[str] | None = None) -> bool:
    """Return whether a dotted path matches a pattern by `fnmatch`, if there are any.

    Matching patterns are added to `used`.
    """
    if not patterns:
        return True
    name = ".".join(map(str, path))
    found = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
    if used is not None:
        used |= found
    return bool(found)
