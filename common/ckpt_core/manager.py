"""`CheckpointManager`: the main object of the public API."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, final

from ckpt_core.collective import SameOptions, agreed_place, agreed_step, agreed_values, checked_step
from ckpt_core.coordination import Coordinator, coordinator_for_job, require_same_process
from ckpt_core.disclosure import logger_of, public_url
from ckpt_core.errors import CheckpointError, ConfigError, FileFailure, OverwrittenError
from ckpt_core.groups import open_root
from ckpt_core.journal import Journal
from ckpt_core.loading import Fetcher, Loader, LoadRequest, Repairer, Selection, narrowed
from ckpt_core.measuring import CostMeter
from ckpt_core.names import step_name
from ckpt_core.options import CheckpointOptions, given_options, signature_with_options
from ckpt_core.policies import Counts, SaveCosts
from ckpt_core.preemption import CadenceKeeper, LastStep
from ckpt_core.retention import PrunePlan, keeps_weights
from ckpt_core.root import Job, Ownership, Pruner
from ckpt_core.saving import Means, SaveHandle, Saver, SaveRequest, SaveThread
from ckpt_core.state import Override, State, as_captured, as_source, checked_override
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Sink, Telemetry
from ckpt_core.tiers import RunCatalog, open_tiers
from ckpt_core.tiers.uploading import RunExports, SaveNumber, TierUploads, demoter_of
from ckpt_core.types import CapturedState, CheckpointInfo, SavedState
from ckpt_core.validation import location, one_of, require
from ckpt_core.vocabulary import instead_of

_logger = logger_of(__name__)
_FAILED_SECONDS = 10.0
_EXPORTER = "ckpt_core.convert:export"


@final
class CheckpointManager:
    """The checkpoints of one run: saved, listed, loaded and pruned.

    - Threads: all methods on the training thread; one background thread writes and commits.
    - Processes: a forked child cannot use its parent's manager; its calls raise.
    - Ranks: construction, the first `due`, `save`, `maybe_save`, `load`, `resume`, `continue_from`, `prune`,
      `pin`, `unpin`, `mark`, `unmark` and `close` are collective over the default process group: every rank
      calls them in the same order. The others are not.
    - Jobs: one job writes to a root at a time, the next is refused; any number may read.

    Args:
        root: directory, fsspec URL (`s3://bucket/run`) or `Storage` of the run.
        options: all other options as one value; see `CheckpointOptions`.
        coordinator: the communication of ranks; by default over the default process group, which must be made
            before the first save or resume. Several managers may share a given one; its owner closes it.
        sinks: receivers of telemetry events.
        listen: whether an `OnPreemption` installs its signal handlers now; else at the first `due`.
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
            raise ConfigError(f"give options= or single options, not both: {', '.join(sorted(overrides))}")
        self._pid = os.getpid()
        self.options = options if options is not None else CheckpointOptions.from_mapping(overrides)
        if exports := self.options.exports:
            from ckpt_core.convert import SINKS

            require("export", *(one_of("to", each.to, SINKS) for each in exports))
        self._owns_coordinator = coordinator is None
        self._make_parts(root, coordinator, sinks=sinks, listen=listen)
        self._in_force, self._closed = Override(), False
        self._initial = self.options.initial_weights
        self._last_step = LastStep()

    def _make_parts(
        self,
        root: str | os.PathLike[str] | Storage,
        given: Coordinator | None,
        *,
        sinks: Sequence[Sink],
        listen: bool,
    ) -> None:
        """Make the parts, in the order in which they need each other."""
        options, deadline = self.options, self.options.deadline_seconds
        self.storage = storage = open_root(
            root, options.storage_options, deadline_seconds=deadline, writers=options.writers
        )
        self._coordinator = coordinator = given or coordinator_for_job(deadline_seconds=deadline)
        # Of roots only URLs must be alike: nodes may mount one directory in different places, or have disks
        # of their own; who sees whose files is found out when the root is taken.
        place = public_url(storage.url) if "://" in storage.url else "a directory"
        self.same_options = SameOptions(coordinator, {"root": place, **given_options(options)})
        tiers = open_tiers(storage, options)
        self._catalog = RunCatalog(tiers)
        further = [tier.storage for tier in tiers[1:]]
        self._journal = journal = Journal(storage, further, enabled=options.journal)
        telemetry = Telemetry(*sinks, *journal.sinks)
        job = Job(storage=storage, coordinator=coordinator, telemetry=telemetry)
        self._uploads = TierUploads(job, options, tiers, RunExports(job, options, _EXPORTER))
        thread = SaveThread(deadline, options.priority)
        self._root = ownership = Ownership(
            storage,
            coordinator,
            until_idle=thread.until_idle,
            hooks=replace(self._uploads.hooks, journal=journal),
            elsewhere=self._uploads.claim,
        )
        demoter = None
        if keeps_weights(options.keep):
            demoter = demoter_of(storage, options.storage_options, options.manifest_signer)
        self._pruner = pruner = Pruner(
            storage, options, ownership=ownership, telemetry=telemetry, demoter=demoter
        )
        self._saver = Saver(job, Means(job, thread, options, ownership=ownership, pruner=pruner))
        self._meter = CostMeter(telemetry, coordinator, self._saver)
        self._cadence = CadenceKeeper(
            options.save,
            coordinator,
            listen=listen,
            measured=self._meter,
            failures=lambda: journal.failures(coordinator.world_size),
        )
        self._cadence.report = partial(telemetry.point, "cadence")
        waited_for = (each.deadline_seconds for each in options.uploads if each.on_preemption == "upload")
        self._cadence.upload_seconds = next(waited_for, 0.0)
        self._loader = Loader(job, tiers=tiers, verify_manifest=options.manifest_verifier)
        self._repairer = Repairer(job, tiers[0], options, ownership=ownership, pruner=pruner)
        self.fetcher = Fetcher(job, tiers, options, ownership)

    if not TYPE_CHECKING:  # a checker knows what is there

        def __getattr__(self, name: str) -> Any:
            advice = "" if name.startswith("_") else instead_of(name, dir(type(self)))
            raise AttributeError(f"'CheckpointManager' object has no attribute {name!r}{advice}")

    __signature__ = signature_with_options(__init__)

    @property
    def preempted(self) -> bool:
        """Whether training must stop, as of the last check for preemptions of any rank."""
        return self._cadence.preempted

    def due(
        self, step: int | None = None, *, total_steps: int | None = None, **counts: Unpack[Counts]
    ) -> str | None:
        """Return the reason to save this step now, or None; for callers of `save`.

        The first call is collective: it compares the options of ranks, before any decision depends on them.
        Without a step it only checks for a preemption, as during an evaluation: collective if the save policy
        has an `OnPreemption`. If there is one, leave the evaluation, on every rank after the same batch, and
        call `maybe_save`. `total_steps`, `epochs` (finished), `tokens` (of all ranks) are for policies that
        need them; counts without a step are where counting begins.
        """
        self._check()
        self.same_options.require()
        if step is None:
            self._meter.pause()
            return self._cadence.check_preemption(**counts)
        step = checked_step("due", step)
        self._meter.step(step)
        self._journal.seen(step)
        reason = self._cadence.due(step, total_steps, **counts)
        self._require_progress()
        self._meter.decided()
        return reason

    def maybe_save(
        self,
        step: int,
        state: State | CapturedState,
        *,
        metrics: Mapping[str, float] | None = None,
        annotations: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
        **counts: Unpack[Counts],
    ) -> SaveHandle | None:
        """Save if the save policy requires it, else return None; see `due` and `save`."""
        handle, reason = None, self.due(step, total_steps=total_steps, **counts)
        if reason is not None:
            noted = {"reason": reason, **(annotations or {})}
            handle = self.save(step, state, metrics=metrics, annotations=noted)
        self.note_step(step, state, metrics=metrics, annotations=annotations)
        return handle

    def note_step(self, step: int, state: State | CapturedState, **arguments: Any) -> None:
        """Note a whole step for `on_exception`, with arguments for `save`."""
        if self.options.on_exception is not None:
            self._last_step.note(step, lambda: as_captured(state), **arguments)

    def save_last_step(self, error: BaseException) -> None:
        """Commit the step that was noted last, if `on_exception` says so.

        Leaving a `with` block by an exception does, and `maybe_save` notes steps. All ranks must come here
        within 10 s. What came of it is noted in `error`; nothing is raised.
        """
        if self.options.on_exception is None or self._closed or isinstance(error, CheckpointError):
            return
        last = self._last_step
        try:
            found = self._coordinator.gather(
                (last.step, last.problem()),
                what="saving the last whole step after an exception",
                deadline_seconds=min(_FAILED_SECONDS, self.options.deadline_seconds),
            )
            problem = next((each for _, each in found if each), "")
            if not problem and len(set(found)) > 1:
                problem = f"ranks are at different steps: {sorted({each for each, _ in found})}"
            newest = self._saver.in_flight.latest
            if not problem:
                if newest is None or newest.step != last.step:
                    self._saver.in_flight.settle()  # back-pressure must not leave it out
                    arguments = dict(last.arguments)
                    noted = {**(arguments.pop("annotations", None) or {}), "reason": "exception"}
                    newest = self.save(last.step, last.state, annotations=noted, **arguments)
                self.wait()
                failed = "it could not begin" if newest is None else newest.committed.exception()
                problem = str(failed or "")
        except (CheckpointError, RuntimeError) as failure:
            problem = str(failure)
        told = f"the last whole step was not saved: {problem}" if problem else f"step {last.step} is saved"
        error.add_note(told)
        _logger.warning("after %s, %s", type(error).__name__, told)

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
            annotations: plain JSON for the manifest.
            name: directory name, if not the step's own. A checkpoint of it is replaced; object stores refuse.

        Returns:
            A handle on the save in flight; None if every arena was in flight already and `back_pressure` is
            `skip`, or if it could not start and `on_error` is `warn`.

        Raises:
            SaveError: this save could not start, or the save before has failed; the same on every rank.
            UploadError: an upload has failed, and its `on_error` is `raise`; the same on every rank.
            CheckpointExistsError: the step is committed already, or, on an object store, the name.
            RootBusyError: another job writes to this root.
            OverwrittenError: a load has left the state partly overwritten.
            ConfigError: the root cannot be written, or an argument is invalid.
        """
        self._bind()
        number = self._uploads.number(extra=self._cadence.extra)
        try:
            self._loader.overwritten.require_none()
            self._require_progress()
            request = SaveRequest.checked(
                step, name, metrics=metrics, annotations=annotations, progress=self._cadence.progress
            )
            own = {**self._cadence.annotations, **request.annotations, **self._in_force.annotations}
            request = replace(request, annotations=own | self._uploads.annotations(number))
            if not isinstance(state, CapturedState):
                as_source(state)  # raises if it is no state
        except (ConfigError, OverwrittenError) as error:
            if self._coordinator.world_size == 1:
                raise
            # The other ranks may have called with valid arguments, and would wait for this one.
            request = SaveRequest(step=0, name=step_name(0), refusal=error)
        if self._initial is not None:
            _logger.warning("init_from= is given, and nothing has loaded it: call resume() or initialise()")
            self._initial = None
        try:
            with self._meter.save(request.step, request.name, request.annotations) as measured:
                if self._cadence.pending:
                    self._saver.in_flight.settle()  # back-pressure must not leave out the last save
                self._uploads.before_save(preempted=self.preempted)
                handle = measured.handle = self._saver.save(request, state)
                measured.skipped = self._saver.skipped
                if handle is not None:
                    self._uploads.follow(handle, number)
                    self._cadence.saved(request.step)
                    self._journal.seen(request.step, began=(measured.began, measured.time))
        finally:
            self._journal.waited()  # also for a save that failed: its stall is time of this training
        return handle

    @property
    def costs(self) -> SaveCosts | None:
        """What saves cost, measured on this rank; None until one is known."""
        return self._meter.costs

    def prewarm(self, state: State | CapturedState) -> int:
        """Allocate arenas ahead of the first save; return their bytes. Collective.

        Raises:
            SaveError: the state cannot be planned; the same on every rank.
            StagingMemoryError: this rank's share does not fit into its memory; other ranks may have room.
        """
        self._bind()
        return self._saver.prewarm(state)

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory for the copies of this rank, also between saves."""
        return self._saver.staging_bytes

    def resume(self, state: State, *, override: Mapping[str, Any] | None = None) -> int | None:
        """Load the newest checkpoint that verifies, and take the root for this job.

        Args:
            state: a `TrainState`, any `StateSource`, or a mapping of tensors and Statefuls.
            override: hyperparameters to change in the optimizers' groups, such as `{"lr": 1e-4}`, see
                `Override`; schedulers continue from a new learning rate. Saves record them as the annotation
                `override`, in a lineage that branches off here. A later resume with the same changes nothing.

        Returns:
            The step restored, or None if there is no checkpoint yet.

        Raises:
            CheckpointNotFoundError: there is no checkpoint yet, and `override` is to change it.
            CorruptCheckpointError: there are checkpoints, and all of them are damaged; nothing was touched.
            OverwrittenError: the same, found too late: nothing is saved until a load has succeeded.
            UntrustedCheckpointError: the same, and `verify_manifest` does not accept some of them.
            IncompatibleCheckpointError: the newest is another model's; nothing was touched.
            RootBusyError: another live job writes to this root.
            ConfigError: `state` is no state, or no optimizer has what `override` names, on any rank.
        """
        self._bind()
        agreed_values(self._coordinator, "resume", lambda: checked_override(state, override).items)
        self._rewind()
        self._uploads.patient = True
        self._own_root()
        request = LoadRequest.to_resume(self.options, Override.of(override))
        loaded = self._loader.newest(request, as_source(state), note_damaged=self._root.note_damaged)
        self._loader.log_surroundings(loaded)
        if loaded is None:
            request.override.require_origin(self.storage.url)
            self.initialise(state)
            return None
        self.has_weights()
        self._continue_from(loaded.info, loaded.saved, request.override)
        self._cadence.saved(loaded.info.step)
        self._repairer.begin(loaded)
        return loaded.info.step

    def initialise(self, state: State) -> None:
        """Load the weights of `init_from` into the model of a state. Collective.

        `resume` does where there is nothing to resume, with its state; call it where nothing is resumed.
        Raises the errors of `load`.
        """
        if (initial := self._initial) is None:
            return
        if (weights := as_source(state).weights()) is None:
            raise ConfigError("init_from= loads the item `model`, and this state has none")
        saved = self.load(
            weights,
            source=initial.place,
            storage_options=initial.storage_options,
            items=["model"],
            rename=initial.rename,
            strict=initial.strict,
            cast=True,
        )
        self._initial = None
        if self._coordinator.is_coordinator:
            _logger.info("training begins with %s: %s", public_url(initial.place), saved.report)

    def has_weights(self) -> None:
        """Note that the model has the weights of its run: `init_from` is ignored."""
        if self._initial is not None and self._coordinator.is_coordinator:
            _logger.info("init_from= is ignored: the model has the weights of this run")
        self._initial = None

    # Every way to narrow a load is a separate keyword, as users would guess it.
    def load(  # noqa: PLR0913
        self,
        state: State,
        *,
        step: int | None = None,
        name: str | None = None,
        source: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        items: Collection[str] | None = None,
        include: Collection[str] = (),
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
        cast: bool = False,
        override: Mapping[str, Any] | None = None,
    ) -> SavedState:
        """Load one checkpoint, or a part of one.

        Args:
            state: to load into; a mapping is filled in place, as by `dcp.load`.
            step: of the checkpoint; the newest that verifies if neither step nor name is given.
            name: directory name under the root, also of a directory that stock DCP wrote.
            source: instead of both, a folder or file anywhere, as a path or URL: weights of Hugging Face, an
                adapter, a checkpoint of another root or of another program. Weights alone are the item
                `model`, and with `items=["model"]` they are so whatever their run calls them. Saves do not
                continue from it.
            storage_options: for the URL of `source`; None for those of a root of the same kind of URL.
            items: load only these, e.g. `["model"]`.
            include: load only entries whose dotted name matches one of these patterns, as by `fnmatch`, e.g.
                `["model.encoder.*"]`. An optimizer's state is loaded whole or not at all.
            rename: name in the checkpoint -> live name, of a parameter or of a module with its children, e.g.
                `{"backbone": "encoder"}`; optimizer state is renamed, too. `{"": "net"}` puts the whole model
                below a module, `{"net": ""}` takes it out of one.
            strict: whether everything must fit; else entries of the model and of mappings that do not fit are
                skipped, with a warning, and listed in the result's `left`.
            cast: whether values are cast to the live tensor's dtype; else different dtypes do not fit.
            override: hyperparameters to change, as in `resume`; of a whole state only.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            CorruptCheckpointError: it is damaged; nothing was touched.
            UntrustedCheckpointError: `verify_manifest` does not accept it; nothing was touched.
            IncompatibleCheckpointError: it does not fit; nothing was touched.
            UnsafeCheckpointError: it needs `allow_pickle=True`; nothing was touched.
            ConfigError: `include`, `rename` or `override` has a name that is not there; nothing was touched.
        """
        self._check()
        self._coordinator.check()
        self.same_options.require()

        def selected() -> Selection:
            return Selection.of(items=items, include=include, rename=rename, strict=strict, cast=cast)

        def checked() -> object:
            narrowed(state, selected())
            if source is not None:
                alone = None if step is None and name is None else "source= goes with neither step= nor name="
                require("load", location("source", source), alone)
            return None if source is None else os.fspath(source), checked_override(state, override).of_whole(
                whole=selected().is_all
            ).items

        step, name = agreed_place(self._coordinator, "load", step, name, others=checked)
        selection = selected()
        self._rewind()
        live, narrower = narrowed(state, selection)
        request = LoadRequest.of(self.options, narrower, Override.of(override))
        info: CheckpointInfo | None = None
        if source is not None:
            place = os.fspath(source)
            # Those of the root serve a place of its kind, too.
            kind, separator, _ = place.partition("://")
            own = separator and self.storage.url.startswith(f"{kind}://")
            others = self.options.storage_options if own else {}
            given = others if storage_options is None else storage_options
            only_model = items is not None and set(items) == {"model"}
            request = replace(request, whole="model" if only_model else "state")
            saved = self._loader.elsewhere(request, live, place, given)
        elif step is not None or name is not None:
            saved, info = self._loader.one(request, live, step=step, name=name)
        else:
            newest = self._loader.required(self._loader.newest(request, live))
            saved, info = newest.saved, newest.info
        if info is not None:
            self.has_weights()
        if selection.is_all and live.takes_all(saved):
            self._continue_from(info, saved, request.override)
        return saved

    def _continue_from(self, info: CheckpointInfo | None, saved: SavedState, change: Override) -> None:
        """Let saves continue from what was loaded whole, and perhaps changed."""
        if info is not None:  # else others wrote it, or it is of another root
            self._root.line.continue_from(info, branch=change.differs_from(saved.annotations))
            self._cadence.count_from(lambda: saved.annotations)
            self._journal.resumed(info.step)
            self._uploads.count_from(SaveNumber.read(saved.annotations), info.step)
        self._in_force = change or Override.in_force(saved.annotations)

    def continue_from(self, step: int | None = None, *, name: str | None = None) -> CheckpointInfo:
        """Let saves continue from a checkpoint whose state is live already. Collective.

        For a host that has loaded it by other means. Without it, saves into the root begin a new lineage.

        Args:
            step: of the checkpoint; the newest of the present lineage if neither step nor name is given.
            name: of its directory.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
        """
        self._bind()
        self._rewind()
        step, name = agreed_place(self._coordinator, "continue_from", step, name)

        def find() -> tuple[CheckpointInfo, list[list[Any]], SaveNumber | None]:
            held = self._catalog.find(step, name)
            annotations = self._catalog.annotations(held)
            return held.info, Override.in_force(annotations).items, SaveNumber.read(annotations)

        info, changed, number = self._coordinator.run_on_coordinator(find, what="looking for a checkpoint")
        self._loader.overwritten.clear()
        self.has_weights()
        self._root.line.continue_from(info)
        self._journal.resumed(info.step)
        self._uploads.count_from(number, info.step)
        self._in_force = Override(dict(changed))
        return info

    def start_afresh(self) -> None:
        """Let saves begin a new lineage on purpose, without a warning.

        For trainings one after another in a root, and for hosts that warn of earlier ones themselves.
        """
        self._check()
        self._rewind()
        self._in_force = Override()
        self._root.line.start_afresh()

    def begin_from(self, other: CheckpointManager) -> None:
        """Name what `other` has loaded from its root as the parent of the next save here."""
        self._root.line.begin_from(other._root.line.parent)

    def wait(self) -> None:
        """Wait for the saves in flight.

        Raises:
            SaveError: a save failed. If several did, the next call raises the next error.
        """
        require_same_process(self._pid)
        with self._meter.wait():
            self._saver.in_flight.wait()
        self._journal.waited()

    def wait_staged(self) -> None:
        """Wait for staged copies, so that weights may change outside `optimizer.step()`.

        Only `staging="overlapped"` needs it: call it before weights are swapped, averaged or loaded, above
        all through `.data`, which cannot be detected. On CUDA, later work on the current streams is ordered
        after the copies; the host does not wait. Not collective, and cheap when nothing is being copied. A
        failed save is not raised here.
        """
        require_same_process(self._pid)
        self._saver.copies.wait()

    def checkpoints(self, *, abandoned: bool = False) -> list[CheckpointInfo]:
        """List the present lineage's checkpoints, oldest first.

        With `abandoned`, those of other lineages, and mere weights, too.
        """
        return self._catalog.committed(abandoned=abandoned)

    def latest(self) -> CheckpointInfo | None:
        """Return the newest committed checkpoint that is not marked, without verifying it."""
        return self._catalog.latest()

    def verify(self, step: int | None = None) -> list[FileFailure]:
        """Verify every byte of a checkpoint, by default the newest; [] if it is whole.

        It is marked as damaged unless every failure has a `twin`; a wrong mark is removed.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
        """
        step = None if step is None else checked_step("verify", step)
        return self._catalog.verify(step, self._root.note_verified)

    def prune(self, *, dry_run: bool = False) -> PrunePlan:
        """Remove checkpoints that the policy does not keep; with `dry_run`, only plan.

        Before any removal, one of the kept checkpoints is verified, unless this manager has verified one.
        """
        self._bind()
        self.wait()
        self._meter.pause()
        if dry_run:
            return self._coordinator.run_on_coordinator(self._pruner.plan, what="pruning")
        self._own_root()
        until = time.monotonic() + self.options.deadline_seconds / 2
        return self._coordinator.run_on_coordinator(partial(self._pruner.apply, until=until), what="pruning")

    def discard(self, name: str) -> None:
        """Remove an unpinned checkpoint. Coordinator only, once this manager has saved."""
        self._pruner.remove(name)

    def pin(self, step: int, reason: str) -> None:
        """Protect a step from pruning until `unpin`."""
        self._bind()
        step = agreed_step(self._coordinator, "pin", step, reason)
        self._coordinator.run_on_coordinator(lambda: self._catalog.pin(step, reason))

    def unpin(self, step: int) -> None:
        """Remove the protection of a step."""
        self._bind()
        step = agreed_step(self._coordinator, "unpin", step)
        self._coordinator.run_on_coordinator(lambda: self._catalog.unpin(step))

    def mark(self, step: int, reason: str) -> None:
        """Mark a step as bad: resumes pass it over like a damaged one. Collective.

        Raises:
            CheckpointNotFoundError: the step is not committed.
        """
        self._bind()
        step = agreed_step(self._coordinator, "mark", step, reason)
        self._coordinator.run_on_coordinator(lambda: self._catalog.mark_bad(step, reason))

    def unmark(self, step: int) -> None:
        """Remove the mark of a step, if it has one. Collective."""
        self._bind()
        step = agreed_step(self._coordinator, "unmark", step)
        self._coordinator.run_on_coordinator(lambda: self._catalog.unmark_bad(step))

    def close(self, *, wait_for_uploads: bool = True) -> None:
        """Wait for saves, uploads and exports and release the root; not in a forked child.

        Args:
            wait_for_uploads: whether to wait for uploads, exports and weights, up to the deadline of each;
                else the next run does the rest.

        Raises:
            SaveError: the save in flight failed.
            UploadError: an upload failed, and its `on_error` is `raise`.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._repairer.close()
        with ExitStack() as ending:
            if self._owns_coordinator:
                ending.callback(self._coordinator.close)
            ending.callback(self._cadence.close)
            ending.callback(self._last_step.close)
            ending.callback(self._pruner.close)
            ending.callback(lambda: self._saver.release(leave=not wait_for_uploads or self.preempted))
            ending.callback(self._meter.close)
            ending.callback(
                lambda: self._uploads.close(
                    leave=not wait_for_uploads,
                    preempted=self.preempted,
                    seconds_left=self._cadence.seconds_left,
                )
            )
            ending.callback(self._journal.end, preempted=self.preempted)
            self._saver.close()

    def _require_progress(self) -> None:
        """Refuse to save what the retention could not tell from milestones."""
        for policy in (self.options.keep, *(each.keep for each in self.options.uploads)):
            needed = frozenset[str]() if policy is None else policy.counts
            if missing := sorted(needed - self._cadence.progress.keys()):
                given = ", ".join(f"{name}=…" for name in missing)
                raise ConfigError(
                    f"{policy!r}: {' and '.join(missing)} must be known of every save, and nothing has said "
                    f"so: call maybe_save(step, state, {given}), or due(step, {given}) before save"
                )

    def _own_root(self) -> None:
        """Wait for the saves in flight and claim the root; see `Ownership.take`."""
        self._saver.in_flight.wait(together=True)
        self._root.take()
        self._coordinator.run_on_coordinator(self._root.check, what="taking the root")

    def _rewind(self) -> None:
        """Wait for the saves in flight, and forget the last one, as a load follows."""
        self._meter.pause()
        self._saver.in_flight.wait(together=True)
        self._saver.in_flight.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.save_last_step(error)
        try:
            self.close(wait_for_uploads=error is None)
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(f"while closing the checkpoint manager: {failure}")

    def _check(self) -> None:
        require_same_process(self._pid)
        if self._closed:
            raise ConfigError("this CheckpointManager is closed; make a new one")

    def _bind(self) -> None:
        """Fix the ranks of the job, for which a save or load is about to be planned."""
        self._check()
        self._coordinator.bind()
        self.same_options.require()
