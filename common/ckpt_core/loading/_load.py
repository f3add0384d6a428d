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

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeAlias, final

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
    lost,
)
from ckpt_core.loading._checkpoint import OpenCheckpoint, open_checkpoint
from ckpt_core.loading._committed_files import CommittedFiles
from ckpt_core.loading._overwritten import Overwritten, shown
from ckpt_core.loading._reads import Reads
from ckpt_core.loading._selection import Selection
from ckpt_core.loading._targets import Misfits, PartLoad, refuse_unlike, with_kinds
from ckpt_core.options import CheckpointOptions, Verify
from ckpt_core.reading import Engine
from ckpt_core.root import Job
from ckpt_core.staging import free_memory
from ckpt_core.state import AdjustableSource, CarefulSource, Override, StateSource, leaves, put_buffers
from ckpt_core.types import CheckpointInfo, SavedState, StateDict

RollBack: TypeAlias = Callable[[], Sequence[tuple[str | int, ...]] | None]

_logger = logger_of(__name__)
_KEEP_BYTES: Final = 256 << 20
_COMPARED: Final = frozenset[Verify]({"read", "arrival"})


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """A checkpoint directory and the options of its load.

    Attributes:
        directory: key of the checkpoint directory.
        selection: the entries to load.
        allow_pickle: whether pickles may be executed.
        verification: the check before anything live changes.
        read_once: whether ranks read for each other.
        committed: the checkpoint found there; None if it may be a directory that stock DCP wrote.
        manifest_sha256: of the trusted manifest; None if manifests are not judged.
        override: hyperparameters to change, unless the checkpoint says that they are changed already.
        replaces: whether to refuse a checkpoint that would leave what failed loads have overwritten.
    """

    directory: str
    selection: Selection = field(default_factory=Selection)
    allow_pickle: bool = False
    verification: Verify = "read"
    read_once: bool = True
    committed: CheckpointInfo | None = None
    manifest_sha256: str | None = None
    override: Override = field(default_factory=Override)
    replaces: bool = False

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


def _keep_bytes() -> int:
    """Return the cache for network reads of this rank, in bytes: half of free memory."""
    free = free_memory()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or "1")
    return _KEEP_BYTES if free is None else free.usable_bytes // (2 * max(1, local_ranks))


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
        self._engine = Engine(job.storage, request.directory, keep_bytes=_keep_bytes())
        self._place = f"{job.storage.url}/{request.directory}"

    def run(self) -> SavedState:
        """Open, verify, begin, fetch and apply; see the module. Collective.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptCheckpointError: it is damaged; nothing was touched.
            IncompatibleCheckpointError: it does not fit the live state; nothing was touched.
            UnsafeCheckpointError: it needs pickle, which is not allowed; nothing was touched.
            OverwrittenError: it failed on a rank after live tensors had been changed.
            LoadError: a rank failed otherwise; nothing was touched.
        """
        with self._engine:
            opened, parts = self._opened()
            reads = Reads.of(parts, self._coordinator, read_once=self._request.read_once)
            with self._span("load.verify"), self._phase("verifying a checkpoint"):
                self._verify(opened, parts, reads)
            roll_back = self._begin(opened, parts)
            with (
                self._touching(opened, parts, roll_back),
                self._span("load.read"),
                self._phase("reading a checkpoint", touched=True),
                _inference_mode(wanted=_any_inference(parts)),
            ):
                with fetch_to(_devices(parts)) as fetch:
                    # Shared reads first, for other ranks wait: a rank that cannot read still sends its share.
                    reads.relay(self._coordinator, self._engine, fetch)
                    self._engine.fetch(reads.private(fetch), fetch)
                    for load in parts.values():
                        load.read_odd_chunks()
                self._apply(opened, parts)
        if opened.drops_kept:
            _logger.warning(
                "%s: each of its %s ranks had its own values; those of the lowest rank were loaded",
                self._place,
                opened.saved.world_size,
            )
        for line in opened.saved.left:
            _logger.warning("%s: partial load: %s", self._place, line)
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

    @property
    def _half_way(self) -> str:
        return (
            f"{self._place}: reading failed half-way and the live state is partly overwritten; resume, or "
            "load another checkpoint, before training continues. Until then nothing is saved"
        )

    def _opened(self) -> tuple[OpenCheckpoint, Mapping[str, PartLoad]]:
        with self._phase("opening a checkpoint") as note:
            opened, parts, misfits = self._open_and_plan()
            if self._request.replaces and (lacking := self._overwritten.lacking(parts, opened.saved)):
                raise _leaves(self._place, lacking, self._overwritten)
            # Whether the checkpoint has names that this rank does not have.
            note.own = bool(misfits.unexpected)
        if any(note.all):
            misfits.intersect(self._coordinator)
        strict = self._request.selection.strict
        if strict:
            misfits.raise_if_any(self._place)  # of the same names on every rank
        left = misfits.lines if strict else [*_if_nothing_fits(opened, parts), *misfits.lines]
        saved = replace(opened.saved, left=left, partial=misfits.partial)
        return replace(opened, saved=saved), parts

    def _span(self, name: str) -> AbstractContextManager[object]:
        attributes = {"name": self._request.directory, "rank": self._coordinator.rank}
        return self._telemetry.span(name, **attributes)

    def _open_and_plan(self) -> tuple[OpenCheckpoint, Mapping[str, PartLoad], Misfits]:
        request = self._request
        opened = open_checkpoint(
            self._storage,
            request.directory,
            self._coordinator,
            selection=request.selection,
            allow_pickle=request.allow_pickle,
            committed=request.manifest_sha256 or request.committed is not None,
        )
        parts, misfits = self._planned(opened)
        if unlike := {part: load.unlike for part, load in parts.items() if load.unlike}:
            # Only the stored chunks say what they are: the source may have other tensors for them.
            opened = replace(opened, saved=with_kinds(opened.saved, unlike))
            parts, misfits = self._planned(opened)
            refuse_unlike({part: load.unlike for part, load in parts.items()}, self._place)
        return opened, parts, misfits

    def _planned(self, opened: OpenCheckpoint) -> tuple[Mapping[str, PartLoad], Misfits]:
        selection = self._request.selection
        parts, misfits = self._targets(opened)
        if selection.strict and (misfits.missing or misfits.mismatched):
            misfits.raise_if_any(self._place)
        for part, load in parts.items():
            if part in opened.contents:  # of other parts nothing fits, which a strict load has refused
                load.plan(opened.contents[part], selection)
        return parts, misfits

    def _targets(self, opened: OpenCheckpoint) -> tuple[dict[str, PartLoad], Misfits]:
        selection, misfits = self._request.selection, Misfits()
        parts: dict[str, PartLoad] = {}
        # Tensors made here, such as optimizer state, must be usable outside of `torch.inference_mode`.
        with _inference_mode(wanted=False):
            targets = self._target(opened.saved)
        for part, tree in targets.items():
            target = {
                item: v for item, v in tree.items() if selection.items is None or item in selection.items
            }
            if not target:
                continue
            _check_memory(target)
            metadata = opened.contents[part].metadata if part in opened.contents else Metadata({})
            load = PartLoad.of(part, target, metadata, allow_pickle=self._request.allow_pickle)
            misfit = misfits.compare(load.entries, metadata, part=part, paths=load.paths, cast=selection.cast)
            load.leave(misfit)
            if opened.loads_kept and not (selection.include or selection.rename):
                load.prefer_kept(self._coordinator.rank)
            parts[part] = load
        return parts, misfits

    def _target(self, saved: SavedState) -> Mapping[str, StateDict]:
        try:
            return self._source.target(saved)
        except IncompatibleCheckpointError as error:
            raise self._misfit(error) from error

    def _misfit(self, error: IncompatibleCheckpointError) -> IncompatibleCheckpointError:
        """Add the checkpoint and a remedy to the error of a state that refuses it."""
        return IncompatibleCheckpointError(
            f"{self._place} does not fit the training state, and nothing was loaded: {error}. "
            "Check the configuration, or load only what fits, with CheckpointManager.load(items=)",
            missing=error.missing,
            unexpected=error.unexpected,
            mismatched=error.mismatched,
        )

    def _verify(self, opened: OpenCheckpoint, parts: Mapping[str, PartLoad], reads: Reads) -> None:
        failures: Sequence[FileFailure] = opened.files.missing_or_truncated(
            self._coordinator.rank, self._coordinator.world_size
        )
        if not failures and self._request.verification == "full":
            failures = self._verify_all(opened.files)
        if not failures and self._compares(opened.files):
            twin_of = opened.files.twin if opened.files.has_twins else None
            # A second file is of use only before anything changes. What is partly overwritten is to be put
            # right by a checkpoint that is known to be whole.
            committed = self._request.committed
            is_marked = committed is not None and committed.damaged is not None
            suspect = twin_of is not None or self._overwritten.error is not None or is_marked
            on_arrival = self._request.verification == "arrival" and not suspect
            failures = opened.files.without_mended(
                self._engine.verify(reads.checked(), twin_of=twin_of, on_arrival=on_arrival)
            )
        if not failures and self._request.verification in _COMPARED:
            failures = opened.files.around_payloads(self._coordinator.rank, self._coordinator.world_size)
        if failures:
            raise _damaged(self._place, failures)
        for load in parts.values():
            load.try_odd_chunks()

    def _compares(self, files: CommittedFiles) -> bool:
        """Return whether this rank compares what it reads, to choose between files."""
        verification = self._request.verification
        if verification == "off":
            return files.has_twins and files.lacks_any()
        return verification in _COMPARED or files.has_twins

    def _verify_all(self, files: CommittedFiles) -> Sequence[FileFailure]:
        """Compare every byte of this rank's share of the files."""
        if not files.is_ours:
            # Without a manifest the work cannot be shared among ranks.
            coordinator = self._coordinator.is_coordinator
            return verify_stock(self._storage, files.directory) if coordinator else []
        whole, others = files.whole(self._coordinator.rank, self._coordinator.world_size)
        damaged = {failure.path for failure in self._engine.verify(whole)}
        # Damaged files a second time, for the names of the lost tensors.
        paths = damaged | others
        if not paths:
            return []
        accepted = self._request.manifest_sha256
        return lost(verify(self._storage, files.directory, paths=paths, sha256=accepted))

    def _begin(self, opened: OpenCheckpoint, parts: Mapping[str, PartLoad]) -> RollBack:
        """Restore small values, which may refuse their state; roll back if any rank fails.

        Returns:
            A function that rolls back later.
        """
        if not isinstance(self._source, CarefulSource):
            return lambda: None
        roll_back: RollBack | None = None
        try:
            with self._phase("restoring small values"), _inference_mode(wanted=_any_inference(parts)):
                try:
                    roll_back = self._source.begin(_loaded(parts), opened.saved)
                except IncompatibleCheckpointError as error:
                    raise self._misfit(error) from error
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
        if isinstance(self._source, AdjustableSource) and change.differs_from(opened.saved.annotations):
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
        try:
            yield
        except BaseException as error:
            found = OverwrittenError(
                f"{self._half_way} ({error})",
                step=opened.saved.step,
                name=self._request.directory,
                damaged=isinstance(error, CorruptCheckpointError),
                failures=error.failures if isinstance(error, CorruptCheckpointError) else (),
            )
            left = roll_back() or ()
            self._overwritten.add(parts, found, left)
            if isinstance(error, IncompatibleCheckpointError | CoordinationError):
                raise error.retold(f"{error}. {self._half_way}") from error
            if isinstance(error, CheckpointError):
                raise found from error
            raise
        self._overwritten.replaced(parts, opened.saved)


def _damaged(place: str, failures: Sequence[FileFailure]) -> CorruptCheckpointError:
    listed = "; ".join(map(str, failures[:5]))
    return CorruptCheckpointError(
        f"{place} is damaged in {len(failures)} place(s): {listed}. "
        "Nothing was loaded; load another step, or resume the newest that verifies",
        failures=tuple(failures),
    )


def _leaves(place: str, lacking: list[str], overwritten: Overwritten) -> IncompatibleCheckpointError:
    by = "a failed load" if overwritten.error is None else overwritten.error.name
    return IncompatibleCheckpointError(
        f"{place} lacks {len(lacking)} value(s) that {by} has overwritten: {shown(lacking)}. It "
        "was not loaded, for the live state would be a mixture of both",
        missing=tuple(lacking),
    )


def _if_nothing_fits(opened: OpenCheckpoint, parts: Mapping[str, PartLoad]) -> list[str]:
    """Return a line for the log if a load that is not strict loads no entry."""
    saved = sum(map(len, opened.saved.sharded.values()))
    if not saved or any(load.entries for load in parts.values()):
        return []
    return [f"nothing was loaded, because none of the checkpoint's {saved} entries fits the training state"]


def _check_memory(target: StateDict) -> None:
    """Refuse to load into tensors without memory: a load in place allocates none."""
    unmade = [".".join(map(str, path)) for path, value in leaves(target) if _is_meta(value)]
    if unmade:
        raise ConfigError(
            f"{len(unmade)} tensor(s) to load into are on the meta device and have no memory, first "
            f"{unmade[0]}. Nothing was loaded: make them first, as by `model.to_empty(device=...)`, and the "
            "optimizer after that"
        )


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _devices(parts: Mapping[str, PartLoad]) -> set[torch.device]:
    """Return the devices with streams among those of the tensors to fill."""
    live = (read.target.tensor for load in parts.values() for read in load.reads)
    return {tensor.device for tensor in live if has_streams(tensor)}


def _any_inference(parts: Mapping[str, PartLoad]) -> bool:
    """Return whether live tensors can be written only inside `torch.inference_mode`."""
    entries = (value for load in parts.values() for value in load.entries.values())
    return any(each.is_inference() for value in entries for each in _held(value))


def _held(value: Any) -> Iterable[torch.Tensor]:
    """Return this rank's plain tensors of an entry."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value] if isinstance(value, torch.Tensor) else []


def _inference_mode(*, wanted: bool) -> AbstractContextManager[object]:
    """Switch the mode on or off, unless it is so already."""
    return nullcontext() if torch.is_inference_mode_enabled() == wanted else torch.inference_mode(mode=wanted)


def _loaded(parts: Mapping[str, PartLoad]) -> dict[str, StateDict]:
    return {part: load.target for part, load in parts.items()}
