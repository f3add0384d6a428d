"""`CheckpointManager`: the one object that users meet."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, final

from ckpt_core.commit import Catalog, verify
from ckpt_core.coordination import Coordinator, coordinator_for_job, require_same_process
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, ConfigError, FileFailure
from ckpt_core.lifecycle import (
    CadenceKeeper,
    Loader,
    LoadRequest,
    SaveHandle,
    Saver,
    SaveRequest,
    Selection,
    agreed_place,
    agreed_step,
    checked_step,
    narrowed,
)
from ckpt_core.names import step_name
from ckpt_core.options import CheckpointOptions
from ckpt_core.retention import PrunePlan
from ckpt_core.state import State, as_captured, as_source, takes_all
from ckpt_core.storage import Storage, open_storage
from ckpt_core.telemetry import Sink, Telemetry
from ckpt_core.types import CapturedState, CheckpointInfo, SavedState
from ckpt_core.validation import mapping, require, text

COALESCED = "coalesced"
"""The reason of a save that makes up for those that back-pressure kept from starting."""


@final
class CheckpointManager:
    """Saves, finds, loads and prunes the checkpoints of one run.

    - Threads: all methods on the thread that trains; saves end on one background thread.
    - Processes: a forked child cannot use its parent's manager; it is told so at once.
    - Ranks: construction, `save`, `maybe_save`, `load`, `resume`, `continue_from`, `prune`, `pin`, `unpin`,
      `mark`, `unmark` and `close` are collective over the default process group: every rank calls them in the
      same order. The others are not.
    - Jobs: one job writes to a root at a time, the next is refused; any number may read.

    Args:
        root: directory, fsspec URL (`s3://bucket/run`) or `Storage` of the run.
        options: everything else as one value; see `CheckpointOptions`.
        coordinator: how ranks agree; by default that of the default process group, which may be made later,
            but before the first save or resume. One that is given may be shared by several managers, and is
            closed by whoever made it.
        sinks: receivers of telemetry events.
        listen: whether an `OnPreemption` hears signals from now on; else from the first `due` or `maybe_save`
            on, for hosts that cannot know whether anybody will ask.
        **overrides: fields of `CheckpointOptions`, e.g. `save=EverySteps(500)`, as values or plain mappings.

    Raises:
        ConfigError: an option is wrong, or the extra for the URL is not installed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        *,
        options: CheckpointOptions | None = None,
        coordinator: Coordinator | None = None,
        sinks: Sequence[Sink] = (),
        listen: bool = True,
        **overrides: Any,
    ) -> None:
        if options is not None and overrides:
            raise ConfigError(
                f"give either options= or single options, not both: {', '.join(sorted(overrides))}"
            )
        self._pid = os.getpid()
        self.options = options if options is not None else CheckpointOptions.from_mapping(overrides)
        deadline = self.options.deadline_seconds
        self.storage = open_storage(root, self.options.storage_options, deadline_seconds=deadline)
        self._coordinator = coordinator or coordinator_for_job(deadline_seconds=deadline)
        self._owns_coordinator = coordinator is None
        self._telemetry = Telemetry(*sinks)
        self._catalog = Catalog(self.storage)
        self._cadence = CadenceKeeper(self.options.save, self._coordinator, listen=listen)
        self._saver = Saver(self.storage, self._coordinator, self.options, self._telemetry)
        self._loader = Loader(
            self.storage,
            self._coordinator,
            self._telemetry,
            verify_manifest=self.options.manifest_verifier,
        )
        self._closed = False

    @property
    def preempted(self) -> bool:
        """Whether training is to stop for a preemption announced to any rank, as of the last look for one."""
        return self._cadence.preempted

    def due(self, step: int | None = None, *, total_steps: int | None = None) -> str | None:
        """Why this step should be saved now, or None; for those who call `save` themselves.

        Without a step it only looks for a preemption, where no steps are made: collective where the save
        policy has an `OnPreemption`. An evaluation is left if it says so, on every rank after the same batch,
        and `maybe_save` called.

        With `back_pressure="coalesce"`, "coalesced" is the reason to make up for saves that were due while
        every arena was in flight: at the first step at which an arena is free on every rank. While one is
        pending, and only then, each call combines one number over the ranks.
        """
        self._check()
        if step is None:
            return self._cadence.look()
        step = checked_step("due", step)
        reason = self._cadence.due(step, total_steps)
        return reason or (COALESCED if self._saver.overdue() else None)

    def maybe_save(
        self,
        step: int,
        state: State | CapturedState,
        *,
        metrics: Mapping[str, float] | None = None,
        annotations: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
    ) -> SaveHandle | None:
        """Save if the save policy says so; see `save`. None if it does not."""
        reason = self.due(step, total_steps=total_steps)
        if reason is None:
            return None
        return self.save(step, state, metrics=metrics, annotations={"reason": reason, **(annotations or {})})

    def save(
        self,
        step: int,
        state: State | CapturedState,
        *,
        metrics: Mapping[str, float] | None = None,
        annotations: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> SaveHandle | None:
        """Copy the state, return, and write and commit it in the background.

        Args:
            step: optimizer steps done; not negative.
            state: a `TrainState`, any `StateSource`, or a mapping of tensors and Statefuls.
            metrics: numbers for `KeepBest`.
            annotations: plain JSON to find again in the manifest.
            name: directory name, if not the step's own. A committed checkpoint of that name is replaced
                once the new one is complete; on an object store, where none can make way, it is refused.

        Returns:
            A handle on the save in flight; None if every arena was in flight already and `back_pressure` is
            `skip` or `coalesce`, or if it could not start and `on_error` is `warn`.

        Raises:
            SaveError: this save could not start, or the save before has failed; the same on every rank.
            CheckpointExistsError: the step is committed already, or, on an object store, the name.
            RootBusyError: another job writes to this root.
            ConfigError: the root cannot be written, or the arguments are not what they should be.
        """
        self._bind()
        capture: Callable[[], CapturedState] = partial(as_captured, state)
        try:
            request = _request(step, state, name, metrics=metrics, annotations=annotations)
        except ConfigError as error:
            if self._coordinator.world_size == 1:
                raise
            # The other ranks may have asked for a save that is right, and would wait for this one.
            request, capture = SaveRequest(step=0, name=step_name(0)), partial(_raise, error)
        if self._cadence.pending:
            self._saver.settle()  # back-pressure must not leave out the last save
        handle = self._saver.save(request, capture)
        if handle is not None:
            self._cadence.saved(request.step)
        return handle

    def prewarm(self, state: State | CapturedState) -> int:
        """Do ahead of the first save what takes only that its time: plan it, and make its arenas. Collective.

        Returns:
            Bytes of host memory that this rank's arenas take from now on.

        Raises:
            SaveError: the state cannot be planned; the same on every rank.
            StagingMemoryError: this rank's share does not fit into its memory; other ranks may have room.
        """
        self._bind()
        return self._saver.prewarm(lambda: as_captured(state))

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that the copies of this rank take, between saves too."""
        return self._saver.staging_bytes

    def resume(self, state: State) -> int | None:
        """Load the newest committed checkpoint that verifies, and take the root for this job.

        Returns:
            The step restored, or None if there is no checkpoint yet.

        Raises:
            CorruptCheckpointError: there are checkpoints, and all of them are damaged.
            UntrustedCheckpointError: the same, and `verify_manifest` does not accept some of them.
            IncompatibleCheckpointError: the newest is another model's; nothing was touched.
            RootBusyError: another live job writes to this root.
            ConfigError: what was given is no state, on any rank.
        """
        self._bind()
        agreed_place(self._coordinator, "resume", None, None, check=lambda: as_source(state))
        self._saver.rewound()
        self._saver.own_root()
        request = LoadRequest.of(self.options, Selection())
        loaded = self._loader.newest(
            request, as_source(state), note_damaged=self._saver.ownership.note_damaged
        )
        self._loader.tell_surroundings(loaded)
        if loaded is None:
            return None
        every_byte = self.storage.rereads_from_memory or self.options.verification == "full"
        if loaded.info.damaged is not None and every_byte:
            self._saver.ownership.note_sound(loaded.info.name)
        self._saver.ownership.line.goes_on_from(loaded.info)
        self._cadence.saved(loaded.info.step)
        return loaded.info.step

    # Everything that narrows a load is a keyword of its own, as users would guess it.
    def load(  # noqa: PLR0913
        self,
        state: State,
        *,
        step: int | None = None,
        name: str | None = None,
        items: Collection[str] | None = None,
        include: Collection[str] = (),
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
        cast: bool = False,
    ) -> SavedState:
        """Load one checkpoint, or a part of one.

        Args:
            state: what to load into; a mapping is filled in place, as by `dcp.load`.
            step: which step; the newest that verifies if neither step nor name is given.
            name: directory name under the root, also of a directory that stock DCP wrote.
            items: load only these, e.g. `["model"]`.
            include: load only entries whose dotted name matches one of these patterns, as by `fnmatch`, e.g.
                `["model.encoder.*"]`. An optimizer's state is loaded whole or not at all.
            rename: name in the checkpoint -> name here, of a parameter or of a module with all below it,
                e.g. `{"backbone": "encoder"}`; optimizer state goes along.
            strict: whether everything must fit; else entries of the model and of mappings that do not are
                left as they are, with a warning, and are in the result's `left`.
            cast: whether values of another dtype than the live tensor's are cast; else they do not fit.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            CorruptCheckpointError: it is damaged; nothing was touched.
            UntrustedCheckpointError: `verify_manifest` does not accept it; nothing was touched.
            IncompatibleCheckpointError: it does not fit; nothing was touched.
            UnsafeCheckpointError: it needs `allow_pickle=True`; nothing was touched.
            ConfigError: `include` or `rename` has a name that is not in the checkpoint; nothing was touched.
        """
        self._check()
        self._coordinator.check()

        def selected() -> Selection:
            return Selection.of(items=items, include=include, rename=rename, strict=strict, cast=cast)

        step, name = agreed_place(
            self._coordinator, "load", step, name, check=lambda: narrowed(state, selected())
        )
        selection = selected()
        self._saver.rewound()
        source, narrower = narrowed(state, selection)
        request = LoadRequest.of(self.options, narrower)
        info: CheckpointInfo | None
        if step is None and name is None:
            loaded = self._loader.newest(request, source)
            if loaded is None:
                raise self._loader.nothing_there()
            saved, info = loaded.saved, loaded.info
        else:
            request = self._loader.locate(request, step=step, name=name)
            saved, info = self._loader.load(request, source), request.committed
        if info is not None and selection.is_all and takes_all(state, saved):
            self._saver.ownership.line.goes_on_from(info)
        return saved

    def continue_from(self, step: int | None = None, *, name: str | None = None) -> CheckpointInfo:
        """Let saves go on from a committed checkpoint whose state is live already; collective.

        For a host that has loaded it by other means, or whose training goes on in the same process under
        another manager. Without it, saving into a root that has checkpoints begins a new lineage.

        Args:
            step: of the checkpoint; the newest of the present lineage if neither step nor name is given.
            name: of its directory.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
        """
        self._bind()
        self._saver.rewound()
        step, name = agreed_place(self._coordinator, "continue_from", step, name)
        info = self._coordinator.run_on_coordinator(
            lambda: (
                self._newest() if step is None and name is None else self._catalog.find(step=step, name=name)
            ),
            what="looking for a checkpoint",
        )
        self._saver.ownership.line.goes_on_from(info)
        return info

    def start_afresh(self) -> None:
        """Let saves begin a new lineage on purpose: nobody is warned of the checkpoints that are left behind.

        For one training after another in the same root, and for a host that has told of them by itself. What
        is loaded afterwards counts, as ever.
        """
        self._check()
        self._saver.rewound()
        self._saver.ownership.line.starts_afresh()

    def wait(self) -> None:
        """Wait for the saves in flight.

        Raises:
            SaveError: one failed; the failure of another behind it is told at the next call.
        """
        require_same_process(self._pid)
        self._saver.wait()

    def wait_staged(self) -> None:
        """Return when weights may be changed by other means than a step of the optimizers that were saved.

        Only `staging="overlapped"` needs it: call it before weights are swapped, averaged or loaded, above
        all through `.data`, which nothing can notice. On CUDA, what is enqueued on the current streams
        afterwards comes after the copies; the host does not wait. Not collective, and cheap when nothing is
        being copied. A save that has failed is not told here.
        """
        require_same_process(self._pid)
        self._saver.wait_staged()

    def checkpoints(self, *, abandoned: bool = False) -> list[CheckpointInfo]:
        """The committed checkpoints of the present lineage, or `abandoned` ones, too; oldest first."""
        return self._catalog.committed(abandoned=abandoned)

    def latest(self) -> CheckpointInfo | None:
        """The newest committed checkpoint that is not marked; it is not verified here."""
        return self._catalog.latest()

    def verify(self, step: int | None = None) -> list[FileFailure]:
        """Read a committed checkpoint (the newest by default) back and compare; [] if all is well.

        One that is damaged is marked, so that nobody relies on it; a mark that is wrong is taken away.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
        """
        step = None if step is None else checked_step("verify", step)
        info = self._newest() if step is None else self._catalog.find(step=step)
        failures = verify(self.storage, info.name)
        self._saver.ownership.note_verified(info, failures)
        return failures

    def prune(self, *, dry_run: bool = False) -> PrunePlan:
        """Remove what the retention policy does not keep; with `dry_run`, only tell.

        Before anything goes, one of the checkpoints that stay is verified, if none has been by this manager.
        """
        self._bind()
        self._saver.wait()
        if dry_run:
            return self._coordinator.run_on_coordinator(self._saver.pruner.plan, what="pruning")
        self._saver.own_root()
        return self._coordinator.run_on_coordinator(self._saver.pruner.apply, what="pruning")

    def discard(self, name: str) -> None:
        """Remove one checkpoint, unless it is pinned; coordinator only, once this manager has saved."""
        self._saver.pruner.remove(name)

    def pin(self, step: int, reason: str) -> None:
        """Protect a step from pruning until `unpin`."""
        self._bind()
        step = agreed_step(self._coordinator, "pin", step, reason)
        self._coordinator.run_on_coordinator(lambda: self._catalog.pin(step, reason))

    def unpin(self, step: int) -> None:
        """Take the protection of a step away."""
        self._bind()
        step = agreed_step(self._coordinator, "unpin", step)
        self._coordinator.run_on_coordinator(lambda: self._catalog.unpin(step))

    def mark(self, step: int, reason: str) -> None:
        """Say that a step must not be trained on: it is passed over as a damaged one is. Collective.

        Raises:
            CheckpointNotFoundError: the step is not committed.
        """
        self._bind()
        step = agreed_step(self._coordinator, "mark", step, reason)
        self._coordinator.run_on_coordinator(
            lambda: self._catalog.mark_bad(self._catalog.find(step=step).name, reason)
        )

    def unmark(self, step: int) -> None:
        """Take back what `mark` said of a step; harmless where nothing was said. Collective."""
        self._bind()
        step = agreed_step(self._coordinator, "unmark", step)

        def unmark() -> None:
            for info in self._catalog.committed(abandoned=True):
                if info.step == step and info.bad is not None:
                    self._catalog.unmark(info.name, bad=True)

        self._coordinator.run_on_coordinator(unmark)

    def close(self) -> None:
        """Wait for the save in flight and give the root back; harmless when repeated, or in a forked child.

        Raises:
            SaveError: the save in flight failed.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        try:
            self._saver.close()
        finally:
            self._cadence.close()
            if self._owns_coordinator:
                self._coordinator.close()

    def _newest(self) -> CheckpointInfo:
        """The newest of the present lineage, marked or not."""
        committed = self._catalog.committed()
        if not committed:
            raise CheckpointNotFoundError(f"nothing has been committed to {self.storage.url} yet")
        return committed[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(f"while closing the checkpoint manager: {failure}")

    def _check(self) -> None:
        require_same_process(self._pid)
        if self._closed:
            raise ConfigError("this CheckpointManager is closed; make a new one")

    def _bind(self) -> None:
        """Stay with the ranks that there are, for something is to be planned for them."""
        self._check()
        self._coordinator.bind()


def _request(
    step: Any,
    state: State | CapturedState,
    name: str | None,
    *,
    metrics: Mapping[str, float] | None,
    annotations: Mapping[str, Any] | None,
) -> SaveRequest:
    """What is asked of a save.

    Raises:
        ConfigError: an argument is not what it should be.
    """
    number = checked_step("save", step)
    require(
        "save",
        None if name is None or name == "" else text("name", name),
        None if metrics is None else mapping("metrics", metrics),
        None if annotations is None else mapping("annotations", annotations),
    )
    if not isinstance(state, CapturedState):
        as_source(state)  # what is no state is refused at once
    return SaveRequest(
        step=number,
        name=step_name(number) if name is None else name,
        metrics=dict(metrics or {}),
        annotations=dict(annotations or {}),
        replace=name is not None,
    )


def _raise(error: ConfigError) -> CapturedState:
    raise error
