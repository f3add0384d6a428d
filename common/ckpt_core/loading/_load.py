"""One load, in phases that all ranks run together.

1. open and plan: the checkpoint's entries are matched with the live state; byte entries are read.
2. verify: every byte to be used is compared with its checksum. Nothing live has changed.
3. begin: small values, which may refuse their state, are restored, and rolled back if any rank refuses.
4. fetch: the same bytes are read again, into the live tensors.
5. apply: values that need the tensors are restored, and the random number generators last.

A load that fails before 4 leaves everything unchanged. After that, only storage that answered a moment before
can fail, or an object without a `begin` that refuses its state: an `OverwrittenError` says that the state is
partly overwritten, `Overwritten` keeps which tensors are, and small values are as before. With "arrival", on
an object store, step 2 is a part of step 4, and damage fails there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Final, Self, TypeAlias, final

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ckpt_core._torch_internals import ShardedTensor
from ckpt_core.collective import Note, collective_phase
from ckpt_core.commit import verify, verify_stock
from ckpt_core.devices import fetch_to, has_streams
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    ConfigError,
    CoordinationError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    OverwrittenError,
    first_of,
    lost,
)
from ckpt_core.formats.dcp_metadata import collector_paused
from ckpt_core.loading._checkpoint import OpenCheckpoint, Whole, open_checkpoint
from ckpt_core.loading._committed_files import CommittedFiles
from ckpt_core.loading._reads import Reads
from ckpt_core.loading._selection import Selection
from ckpt_core.loading._targets import Misfits, PartLoad, refuse_unlike, with_kinds
from ckpt_core.options import CheckpointOptions, Verify
from ckpt_core.reading import Engine, RangeRead
from ckpt_core.root import Job
from ckpt_core.staging import free_memory
from ckpt_core.state import POSITIONS, Override, StateSource, leaves, put_buffers
from ckpt_core.types import CheckpointInfo, SavedState, StateDict

Path: TypeAlias = tuple[str | int, ...]
Entry: TypeAlias = tuple[str | None, Path]
"""Part of a checkpoint, and path of a tensor in its live state; of a small value, None and its path."""
RollBack: TypeAlias = Callable[[], Sequence[Path] | None]

_logger = logger_of(__name__)
_KEEP_BYTES: Final = 256 << 20
_COMPARED: Final = frozenset[Verify]({"read", "arrival"})
_SHOWN: Final = 5


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """A checkpoint directory and the options of its load.

    Attributes:
        verification: the check before anything live changes.
        committed: the checkpoint found there; None if it may be what others wrote.
        file: in the directory, which is the checkpoint of others.
        whole: whether it is one state or model, be it in several parts; see `open_parts`.
        manifest_sha256: of the trusted manifest; None if manifests are not judged.
        override: hyperparameters to change, unless the checkpoint says that they are changed already.
        replaces: whether to refuse a checkpoint that would leave what failed loads have overwritten.
    """

    directory: str
    selection: Selection = field(default_factory=Selection)
    allow_pickle: bool = False
    verification: Verify = "read"
    committed: CheckpointInfo | None = None
    manifest_sha256: str | None = None
    override: Override = field(default_factory=Override)
    replaces: bool = False
    file: str = ""
    whole: Whole = ""

    @classmethod
    def of(cls, options: CheckpointOptions, selection: Selection, override: Override | None = None) -> Self:
        """Make a request of a manager's options, without a directory yet."""
        return cls(
            directory="",
            selection=selection,
            allow_pickle=options.allow_pickle,
            verification=options.verification,
            override=override or Override(),
        )

    @classmethod
    def to_resume(cls, options: CheckpointOptions, override: Override) -> Self:
        """Make the request of a resume: everything, whatever failed loads have left."""
        made = cls.of(options, Selection(), override)
        return replace(made, verification=options.resume_verification, replaces=True)


@final
class Overwritten:
    """What failed loads have written to, and no load has replaced.

    One for each manager, and on each rank its own.

    Attributes:
        error: the failure of the last load that left something; None if the live state is no mixture.
    """

    def __init__(self) -> None:
        self._left: dict[Entry, None] = {}
        self.error: OverwrittenError | None = None

    def add(self, entries: Iterable[Entry], error: OverwrittenError) -> None:
        """Record what a failed load has filled, and not put back."""
        self._left |= dict.fromkeys(entries)
        self.error = error.retold(str(error))  # without frames, which keep what was loaded

    def check_replaced(self, entries: Iterable[Entry], place: str) -> None:
        """Refuse a checkpoint without entries that failed loads have left."""
        replaced = set(entries)
        by = "a failed load" if self.error is None else self.error.name
        if lacking := _names(entry for entry in self._left if entry not in replaced):
            raise IncompatibleCheckpointError(
                f"{place} lacks {len(lacking)} value(s) that {by} has overwritten: "
                f"{first_of(lacking, _SHOWN)}. It was not loaded, for the live state would be a mixture of "
                "both",
                missing=tuple(lacking),
            )

    def replace(self, entries: Iterable[Entry]) -> None:
        """Record that a load of these entries has succeeded."""
        replaced = set(entries)
        self._left = {entry: None for entry in self._left if entry not in replaced}
        if not self._left:
            self.error = None

    def clear(self) -> None:
        """Forget everything: the live state is known to be whole."""
        self._left, self.error = {}, None

    def require_none(self) -> None:
        """Refuse to save a mixture of checkpoints."""
        if self.error is not None:
            raise self.error.retold(
                f"the state is not saved, because it would be a mixture: {self.error.name} was loaded in "
                f"part, and nothing has replaced {first_of(_names(self._left), _SHOWN) or 'some values'} "
                "since. Resume, or load a whole checkpoint; if you have built a new training state, make a "
                "new CheckpointManager for it"
            )


def _names(entries: Iterable[Entry]) -> list[str]:
    return [".".join(map(str, path)) for _, path in entries]


def _tensors(parts: Mapping[str, PartLoad]) -> list[Entry]:
    return [
        (part, tuple(load.paths[key]))
        for part, load in parts.items()
        for key, value in load.entries.items()
        if isinstance(value, torch.Tensor)
    ]


def _replaced(parts: Mapping[str, PartLoad], saved: SavedState) -> list[Entry]:
    """Return the tensors that a load fills, the small values, and what holds these."""
    groups = (saved.per_rank, saved.shared, saved.shared.get(POSITIONS, {}))
    paths = (path for group in groups for path, _ in leaves(group))
    return _tensors(parts) + [(None, path[:end]) for path in paths for end in range(1, len(path) + 1)]


@final
class Load:
    """One load, on one rank, of a checkpoint directory of ours or of stock DCP."""

    def __init__(self, request: LoadRequest, source: StateSource, job: Job, overwritten: Overwritten) -> None:
        self._request = request
        self._source = source
        self._storage = job.storage
        self._coordinator = job.coordinator
        self._telemetry = job.telemetry
        self._overwritten = overwritten
        self._place = "/".join(filter(None, (job.storage.url, request.directory, request.file)))

    @collector_paused()
    def run(self) -> SavedState:
        """Open, verify, begin, fetch and apply; see the module. Collective.

        Errors are those of `CheckpointManager.load`; an `OverwrittenError` if live tensors have been changed.
        """
        opened, parts = self._opened()
        free, files = free_memory(), opened.files
        # Of network reads, half of the free memory of the host, shared by its ranks.
        keep_bytes = _KEEP_BYTES if free is None else free.share_bytes // 2
        with Engine(files.storage, files.directory, keep_bytes=keep_bytes) as self._engine:
            reads = Reads.of(parts, self._coordinator)
            with self._span("load.verify"), self._phase("verifying a checkpoint"):
                self._verify(opened, parts, reads)
            roll_back = self._begin(opened, parts)
            with (
                self._touching(opened, parts, roll_back),
                self._span("load.read"),
                self._phase("reading a checkpoint", touched=True),
                _inference_mode(wanted=_any_inference(parts)),
            ):
                live = (read.target.tensor for load in parts.values() for read in load.reads)
                with fetch_to({tensor.device for tensor in live if has_streams(tensor)}) as fetch:
                    # Shared reads first, for other ranks wait: a rank that cannot read still sends its share.
                    reads.relay(self._coordinator, self._engine, fetch)
                    self._engine.fetch(reads.private(fetch), fetch)
                    for load in parts.values():
                        load.read_rebuilt(into_place=True)
                self._apply(opened, parts)
        if opened.drops_kept:
            _logger.warning(
                "%s: each of its %s ranks had its own values; those of the lowest rank were loaded",
                self._place,
                opened.saved.world_size,
            )
        if opened.saved.left:
            report = opened.saved.report if opened.saved.matched else opened.saved.left[0]
            _logger.warning("%s: partial load: %s", self._place, report)
        return opened.saved

    def _phase(self, what: str, *, touched: bool = False) -> AbstractContextManager[Note]:
        """Open a phase that fails on all ranks or on none; see `collective_phase`."""
        untouched = (
            f"{self._place} could not be loaded, for a reason that is no damage. Nothing was loaded and no "
            "older checkpoint was tried; remove the cause, in the storage or where the live state is made, "
            "and try again"
        )
        consequence = "reading into place failed" if touched else untouched
        return collective_phase(self._coordinator, consequence, what=what)

    def _span(self, name: str) -> AbstractContextManager[object]:
        return self._telemetry.span(name, name=self._request.directory, rank=self._coordinator.rank)

    def _opened(self) -> tuple[OpenCheckpoint, Mapping[str, PartLoad]]:
        request = self._request
        with self._phase("opening a checkpoint") as note:
            opened = open_checkpoint(
                self._storage,
                request.directory,
                self._coordinator,
                selection=request.selection,
                allow_pickle=request.allow_pickle,
                committed=request.manifest_sha256 or request.committed is not None,
                file=request.file,
                whole=request.whole,
            )
            parts, misfits = self._planned(opened)
            if unlike := {part: load.unlike for part, load in parts.items() if load.unlike}:
                # Only the stored chunks say what they are: the source may have other tensors for them.
                opened = replace(opened, saved=with_kinds(opened.saved, unlike))
                parts, misfits = self._planned(opened)
                refuse_unlike({part: load.unlike for part, load in parts.items()}, self._place)
            if request.replaces and self._overwritten.error is not None:
                self._overwritten.check_replaced(_replaced(parts, opened.saved), self._place)
            # Whether the checkpoint has names that this rank does not have.
            note.own = bool(misfits.unexpected)
        if any(note.all):
            misfits.intersect(self._coordinator)
        strict = request.selection.strict
        if strict:
            misfits.raise_if_any(self._place)  # of the same names on every rank
        left, saved_entries = misfits.lines, sum(map(len, opened.saved.sharded.values()))
        if not strict and saved_entries and not any(load.entries for load in parts.values()):
            left.insert(
                0,
                f"nothing was loaded, because none of the checkpoint's {saved_entries} entries fits the "
                "training state",
            )
        saved = replace(
            opened.saved,
            left=left,
            partial=misfits.partial,
            matched=sum(len(load.entries) for load in parts.values()),
            missing=misfits.missing,
            unexpected=misfits.unexpected,
            mismatched=misfits.mismatched,
        )
        return replace(opened, saved=saved), parts

    def _planned(self, opened: OpenCheckpoint) -> tuple[Mapping[str, PartLoad], Misfits]:
        """Match the parts of the live state, and plan what to read for each."""
        selection, misfits = self._request.selection, Misfits()
        parts: dict[str, PartLoad] = {}
        # Tensors made here, such as optimizer state, must be usable outside of `torch.inference_mode`.
        with _inference_mode(wanted=False), self._naming_misfits():
            targets = self._source.target(opened.saved)
        for part, tree in targets.items():
            target = {
                item: v for item, v in tree.items() if selection.items is None or item in selection.items
            }
            if not target:
                continue
            _check_memory(target)
            metadata = opened.contents[part].metadata if part in opened.contents else Metadata({})
            load = PartLoad(part, target, metadata, allow_pickle=self._request.allow_pickle)
            load.leave_tied()
            misfit = misfits.compare(load.entries, metadata, part=part, paths=load.paths, cast=selection.cast)
            load.leave(misfit)
            if opened.loads_kept and not (selection.include or selection.rename):
                load.prefer_kept(self._coordinator.rank)
            parts[part] = load
        if selection.strict and (misfits.missing or misfits.mismatched):
            misfits.raise_if_any(self._place)
        for part, load in parts.items():
            if part in opened.contents:  # of other parts nothing fits, which a strict load has refused
                load.plan(opened.contents[part], selection)
        return parts, misfits

    @contextmanager
    def _naming_misfits(self) -> Generator[None]:
        """Add the checkpoint and a remedy to the error of a state that refuses it."""
        try:
            yield
        except IncompatibleCheckpointError as error:
            raise IncompatibleCheckpointError(
                f"{self._place} does not fit the training state, and nothing was loaded: {error}. "
                "Check the configuration, or load only what fits, with CheckpointManager.load(items=)",
                missing=error.missing,
                unexpected=error.unexpected,
                mismatched=error.mismatched,
            ) from error

    def _verify(self, opened: OpenCheckpoint, parts: Mapping[str, PartLoad], reads: Reads) -> None:
        files, rank, world_size = opened.files, self._coordinator.rank, self._coordinator.world_size
        verification = self._request.verification
        failures: Sequence[FileFailure] = files.missing_or_truncated(rank, world_size)
        if not failures and verification == "full":
            failures = self._verify_all(files)
        compares = verification in _COMPARED or (
            files.has_twins and (verification != "off" or files.lacks_any())
        )
        if not failures and compares:
            twin_of = files.twin if files.has_twins else None
            # A second file is of use only before anything changes. What is partly overwritten is to be put
            # right by a checkpoint that is known to be whole.
            committed = self._request.committed
            is_marked = committed is not None and committed.damaged is not None
            suspect = twin_of is not None or self._overwritten.error is not None or is_marked
            on_arrival = verification == "arrival" and not suspect
            # What others wrote, or a host beside ours, may have no checksums.
            checked, others = list[RangeRead](), list[RangeRead]()
            for each in reads.checked():
                (checked if each.payload.has_checksum else others).append(each)
            failures = files.damaged_files(each.payload.path for each in others) or files.without_mended(
                self._engine.verify(checked, twin_of=twin_of, on_arrival=on_arrival)
            )
        if not failures and verification in _COMPARED:
            failures = files.around_payloads(rank, world_size)
        if failures:
            raise CorruptCheckpointError(
                f"{self._place} is damaged in {len(failures)} place(s): "
                f"{'; '.join(map(str, failures[:_SHOWN]))}. "
                "Nothing was loaded; load another step, or resume the newest that verifies",
                failures=tuple(failures),
            )
        for load in parts.values():
            load.read_rebuilt(into_place=False)

    def _verify_all(self, files: CommittedFiles) -> Sequence[FileFailure]:
        """Compare every byte of this rank's share of the files."""
        if not files.is_ours:
            # Without a manifest the work cannot be shared among ranks.
            return verify_stock(files.storage, files.directory) if self._coordinator.is_coordinator else []
        whole, others = files.whole(self._coordinator.rank, self._coordinator.world_size)
        damaged = {failure.path for failure in self._engine.verify(whole)}
        # Damaged files a second time, for the names of the lost tensors.
        paths = damaged | others
        if not paths:
            return []
        is_stored = files.storage is self._storage  # of a view, the manifest is in memory
        accepted = self._request.manifest_sha256 if is_stored else None
        return lost(verify(files.storage, files.directory, paths=paths, sha256=accepted))

    def _begin(self, opened: OpenCheckpoint, parts: Mapping[str, PartLoad]) -> RollBack:
        """Restore small values, which may refuse their state; roll back if any rank fails.

        Return what rolls back later.
        """
        roll_back: RollBack | None = None
        try:
            with (
                self._phase("restoring small values"),
                _inference_mode(wanted=_any_inference(parts)),
                self._naming_misfits(),
            ):
                roll_back = self._source.begin(_loaded(parts), opened.saved)
        except BaseException:
            if roll_back is not None:
                roll_back()
            raise
        return roll_back

    def _apply(self, opened: OpenCheckpoint, parts: Mapping[str, PartLoad]) -> None:
        """Restore values that need the tensors; the random number generators last."""
        for part, load in parts.items():
            put_buffers(opened.local, part, load.entries)
        self._source.apply(_loaded(parts), opened.saved)
        change = self._request.override
        if change.differs_from(opened.saved.annotations):
            self._source.override(change)
        elif change and self._coordinator.is_coordinator:
            _logger.warning(
                "%s: the override %s is in force already, and nothing was changed",
                self._place,
                dict(change.values),
            )

    @contextmanager
    def _touching(
        self, opened: OpenCheckpoint, parts: Mapping[str, PartLoad], roll_back: RollBack
    ) -> Generator[None]:
        """Record what a failure leaves overwritten; put small values back."""
        half_way = (
            f"{self._place}: reading failed half-way and the live state is partly overwritten; resume, or "
            "load another checkpoint, before training continues. Until then nothing is saved"
        )
        try:
            yield
        except BaseException as error:
            found = OverwrittenError(
                f"{half_way} ({error})",
                step=opened.saved.step,
                name=self._request.directory,
                damaged=isinstance(error, CorruptCheckpointError),
                failures=error.failures if isinstance(error, CorruptCheckpointError) else (),
            )
            # Of small values those that were put back and not undone.
            left: list[Entry] = [(None, path) for path in roll_back() or ()]
            self._overwritten.add(_tensors(parts) + left, found)
            if isinstance(error, IncompatibleCheckpointError | CoordinationError):
                raise error.retold(f"{error}. {half_way}") from error
            if isinstance(error, CheckpointError):
                raise found from error
            raise
        if self._overwritten.error is not None:
            self._overwritten.replace(_replaced(parts, opened.saved))


def _check_memory(target: StateDict) -> None:
    """Refuse to load into tensors without memory: a load in place allocates none."""
    unmade = [
        ".".join(map(str, path))
        for path, value in leaves(target)
        if isinstance(value, torch.Tensor) and value.device.type == "meta"
    ]
    if unmade:
        raise ConfigError(
            f"{len(unmade)} tensor(s) to load into are on the meta device and have no memory, first "
            f"{unmade[0]}. Nothing was loaded: make them first, as by `model.to_empty(device=...)`, and the "
            "optimizer after that"
        )


def _any_inference(parts: Mapping[str, PartLoad]) -> bool:
    """Return whether live tensors can be written only inside `torch.inference_mode`."""
    held = (
        [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
        for load in parts.values()
        for value in load.entries.values()
    )
    return any(each.is_inference() for own in held for each in own if isinstance(each, torch.Tensor))


def _inference_mode(*, wanted: bool) -> AbstractContextManager[object]:
    return nullcontext() if torch.is_inference_mode_enabled() == wanted else torch.inference_mode(mode=wanted)


def _loaded(parts: Mapping[str, PartLoad]) -> dict[str, StateDict]:
    return {part: load.target for part, load in parts.items()}
