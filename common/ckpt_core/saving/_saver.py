"""All saves of one manager, each up to the point at which training goes on.

If names, shapes, dtypes and placements are unchanged since the last save, a save costs one all-reduce of a
few integers, for any number of ranks and tensors. Storage is not touched unless the save must be refused.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, final

from ckpt_core.commit import working_name
from ckpt_core.crew import run_with_timeout
from ckpt_core.dcp import GroupNames
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, ConfigError, CoordinationError, SaveError
from ckpt_core.names import SHARED, rank_name, shared_name
from ckpt_core.options import bytes_text
from ckpt_core.provenance import configuration_digest
from ckpt_core.root import Job
from ckpt_core.saving._checks import (
    LoadNotes,
    TrainedSlots,
    is_finite,
    refuse_non_finite_in_files,
    trained_slots,
)
from ckpt_core.saving._disk_space import SpaceNeeded
from ckpt_core.saving._in_flight import InFlightSaves, SaveHandle, SaveRequest, failed_in, save_error
from ckpt_core.saving._plan_cache import KeepOwn, Offer
from ckpt_core.saving._save import Means, Save
from ckpt_core.saving._stager import Stager, StepGuard
from ckpt_core.staging import Arenas
from ckpt_core.state import (
    PICKLED,
    EncodedItems,
    RankBuffers,
    State,
    as_captured,
    encode_items,
    get,
    pickled_key,
)
from ckpt_core.types import CapturedState, Lineage, Provenance

_logger = logger_of(__name__)
_MICROSECONDS: Final = 1_000_000
_AGREEING: Final = "agreeing on a save"
_PLANNING: Final = "planning a save"
_LOSS: Final = "loss"
_IN_JSON: Final = 2
"""Upper bound of a tensor's size as JSON, relative to its size in memory."""
_FILES_PER_PART: Final = 2
_OTHER_FILES: Final = 2
"""The chunk table, and the file of rank-local buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _LocalState:
    """The captured state of this rank, with its small values encoded.

    `files` are those that it could write; `changed` whether the cached plan no longer fits; `extra` is what
    it writes at most beside tensors.
    """

    state: CapturedState = field(default_factory=CapturedState)
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    shared: EncodedItems = field(default_factory=lambda: encode_items({}))
    changed: bool = True
    extra: SpaceNeeded = field(default_factory=SpaceNeeded)
    error: BaseException | None = None


@final
class Saver:
    """The saves of one manager, into one root.

    Attributes:
        copies: makes optimizer steps wait for copies that are still being made.
        skipped: whether back-pressure left the last save out.
        optimizers: of the last state saved.

    Concurrency: methods on the main thread; `save` and `prewarm` are collective.
    """

    def __init__(self, job: Job, means: Means) -> None:
        self._job, self._coordinator, self._means = job, job.coordinator, means
        self._ownership, self._options, self._plans = means.ownership, means.options, means.plans
        self._notes = LoadNotes(allow_pickle=means.options.allow_pickle)
        self._configuration: str | None = None
        self._trained: tuple[int, TrainedSlots] = (-1, {})
        self._asked = ""
        self._warned = self._told_of_waves = False
        self._entered = threading.Lock()
        self.in_flight = InFlightSaves(job.coordinator, means.thread, means.options)
        self._stager = Stager(
            Arenas(means.options.arenas, means.options.staging_memory_bytes),
            means.options.priority,
            until_free=self.in_flight.until_committed,
            held_bytes=job.storage.own.held_bytes,
            is_finite=is_finite if means.options.reject_non_finite else None,
        )
        self.copies = StepGuard()
        self.skipped = False
        self.optimizers: Sequence[Any] = ()

    def save(self, request: SaveRequest, state: State | CapturedState) -> SaveHandle | None:
        """Stage a save now and commit it in the background; None if it is skipped.

        A save is skipped while others are in flight, or after an error, if the options say so.

        Raises:
            SaveError: the save could not start, or the one before has failed.
            CheckpointExistsError: the name is taken; the same on every rank.
            ConfigError: ranks ask for different saves, the same on every rank; or another thread is saving.
        """
        if not self._entered.acquire(blocking=False):
            raise ConfigError(
                f"step {request.step} was not saved to {self._job.storage.url}: another thread of this "
                "process is in save() of the same CheckpointManager; call its methods on the thread that "
                "trains"
            )
        rank, telemetry = self._coordinator.rank, self._job.telemetry
        try:
            self.skipped = not self.in_flight.ready()
            if self.skipped:
                telemetry.point("save.skipped", step=request.step, rank=rank)
                return None
            latest = self.in_flight.latest
            if latest is not None and not request.replace and self._asked == request.name:
                return latest  # requested twice: by the cadence, and at the end of the run
            with telemetry.span("save.stall", step=request.step, rank=rank):
                self._ownership.take()
                self._warn_of_lost_nodes()
                save = self._prepare(self._checked(request), state)
                self._asked = request.name
                self.optimizers = save.optimizers
                self.copies.watch(None if save.staged.waves else save.staged.deferred, save.optimizers)
                self.in_flight.start(save)
                if save.staged.waves is not None:
                    self._copy_in_waves(save)
        except SaveError:
            if self._options.on_error == "raise":
                raise
            _logger.exception("training continues without the checkpoint of step %d", request.step)
            return None
        else:
            return save.handle
        finally:
            self._entered.release()

    def _copy_in_waves(self, save: Save) -> None:
        """Copy all of the state while it is written; tell once what that has cost."""
        staged, options, began = save.staged, self._options, time.monotonic()
        if staged.deferred is not None:
            staged.deferred.wait()
        if self._told_of_waves or save.handle.error is not None:
            return
        self._told_of_waves, held = True, self._stager.arenas.size_bytes
        _logger.warning(
            "step %d: this rank's copy of the state takes %s, and memory holds %s of it at a time: it is "
            "saved in %d waves, and training waited %.3g s for all but the last to be written%s. "
            "staging_memory='%d MiB' avoids that where the memory is there; so does a state over more ranks",
            save.request.step,
            bytes_text(staged.size_bytes),
            bytes_text(held),
            -(-staged.size_bytes // held),
            time.monotonic() - began,
            " in spite of staging='overlapped'" if options.staging == "overlapped" else "",
            options.arenas * ((staged.size_bytes >> 20) + 1),
        )

    def prewarm(self, state: State | CapturedState) -> int:
        """Plan and allocate the arenas ahead of the first save; return their bytes here.

        Raises:
            SaveError: planning failed on a rank; the same on every rank.
            StagingMemoryError: this rank's share does not fit; others may have room.
        """
        self.in_flight.wait(together=True)
        plans, coordinator = self._plans, self._coordinator
        local = self._capture(state)
        try:
            flags = [int(local.error is not None), int(local.changed)]
            failed, changed = coordinator.all_reduce_max(flags, what=_PLANNING)
            if failed:
                coordinator.gather(local.error)
            if changed:
                plans.negotiate(coordinator)
            plans.raise_pending()
        except CoordinationError as lost:
            raise save_error(self._job.storage.url, 0, "plan", lost) from lost
        try:
            return self._stager.prewarm(plans.parts, plans.generation)
        finally:
            plans.release()

    @property
    def idle(self) -> bool:
        return self._means.thread.idle

    @property
    def waited_seconds(self) -> float:
        return self.copies.waited_seconds

    @property
    def staging_bytes(self) -> int:
        return self._stager.arenas.size_bytes

    def close(self) -> None:
        """Wait for the saves in flight, and free the arenas; `release` follows."""
        try:
            self.in_flight.close()
        finally:
            self.copies.close()
            self._stager.close()

    def release(self, *, leave: bool = False) -> None:
        """Remove what only uploads had kept, and release the root, after `close`.

        Unless it is to `leave` it, what retention makes weights of is waited for.
        """
        if self._means.thread.stuck():
            # Storage may hang on this thread, too; at the latest, the lock ends with the process.
            run_with_timeout(self._options.deadline_seconds, self._ownership.release)
            return
        means, half = self._means, self._options.deadline_seconds / 2
        if means.pruner.behind and not leave:
            means.apply_retention(None, lambda: True, until=time.monotonic() + half)
        elif means.held_back is not None:
            # A job that ends may have little time: of a large checkpoint at most a part is read back for it.
            means.apply_retention(means.held_back, lambda: False)
        self._ownership.release()

    def _checked(self, request: SaveRequest) -> SaveRequest:
        """Return the request, with this rank's refusal, if any, which every rank learns."""
        if request.refusal is not None:
            return request
        try:
            loss = request.metrics.get(_LOSS, 0.0)
            if self._options.reject_non_finite and not math.isfinite(loss):
                raise SaveError(f"the metric {_LOSS!r} is {loss}, and reject_non_finite is on")
            if hung := self._means.thread.stuck():
                raise SaveError(f"a save before this one was given up and still hangs here: {hung}")
        except CheckpointError as error:
            return replace(request, refusal=error)
        return request

    def _warn_of_lost_nodes(self) -> None:
        """Warn once, on the coordinator, if a lost node takes all checkpoints with it."""
        options, disks = self._options, self._job.storage.num_disks
        survives = options.uploads or options.replicas > 1
        if self._warned or disks == 1 or survives or not self._coordinator.is_coordinator:
            return
        self._warned = True
        _logger.warning(
            "%s is on a disk of its own on each of %d nodes, and every checkpoint is spread over all of "
            "them: when one node is lost, no checkpoint there can be loaded any more. Give upload= a place "
            "that outlives the nodes, or replicas=2 against the loss of one, or a root that all nodes share",
            self._job.storage.url,
            disks,
        )

    def _prepare(self, request: SaveRequest, state: State | CapturedState) -> Save:
        """Capture, agree and stage: the part that blocks training. Nothing is written."""
        plans, coordinator, means = self._plans, self._coordinator, self._means
        local = self._capture(state, request.refusal)
        try:
            trouble, changed, moment, extra = self._all_reduce(request, local)
            if trouble:
                request = replace(request, name=self._clear_name(request, local.error))
            if changed:
                plans.negotiate(coordinator)
            if means.partners is not None:
                means.partners.settle(coordinator)
        except CoordinationError as error:
            raise save_error(means.storage.url, request.step, "plan", error) from error
        save_id = self._ownership.id_at(moment)
        lead = coordinator.is_coordinator
        save = Save(
            means=means,
            channel=coordinator.commit_channel(),
            request=request,
            save_id=save_id,
            working=working_name(means.storage, request.name, save_id),
            created=moment / _MICROSECONDS,
            files={
                **{name: content for name, content in local.files.items() if name in plans.files},
                **self._shared_file(local.shared),
            },
            metadata=plans.metadata,
            items=_kinds(local.state),
            buffers=frozenset(local.state.local),
            keeping=plans.keeping,
            optimizers=local.state.optimizers,
            lineage=self._ownership.line.lineage_of(request.step) if lead else Lineage(),
            generation=plans.generation,
            extra=extra,
            replicas=plans.replicas,
            provenance=self._provenance(local.state) if lead else Provenance(),
        )
        try:
            self._stage(save, local)
        except Exception as caught:  # noqa: BLE001 - the commit barrier carries it to every rank
            save.error = failed_in("stage", caught)
        finally:
            plans.release()
        return save

    def _provenance(self, state: CapturedState) -> Provenance:
        if self._configuration is None:
            host = state.configuration
            self._configuration = configuration_digest(
                lambda: {"options": self._options.chosen, "host": None if host is None else host()}
            )
        return Provenance(configuration_sha256=self._configuration, data=state.positions)

    def _capture(self, state: State | CapturedState, refusal: Exception | None = None) -> _LocalState:
        try:
            if refusal is not None:
                raise refusal
            return self._encode(as_captured(state))
        except Exception as error:  # noqa: BLE001 - an exchange carries it to every rank
            return _LocalState(error=error)

    def _encode(self, state: CapturedState) -> _LocalState:
        plans, coordinator = self._plans, self._coordinator
        scope, several = rank_name(coordinator.rank), coordinator.world_size > 1
        per_rank, shared = encode_items(state.per_rank), encode_items(state.shared)
        files = {**state.files, scope: per_rank.content}
        sharded: dict[str, Mapping[str, Any]] = dict(state.sharded)
        pickled = {pickled_key(scope, name): content for name, content in per_rank.pickled.items()}
        pickled |= {pickled_key("shared", name): content for name, content in shared.pickled.items()}
        if pickled:
            sharded[""] = {**sharded.get("", {}), PICKLED: pickled}
        changed = plans.update(sharded, _offer(state, files, several=several))
        small = [len(content) for name, content in files.items() if changed or name in plans.files]
        if coordinator.is_coordinator or changed or plans.shared:
            small.append(len(shared.content))
        buffers = (
            sum(tensor.numel() * tensor.element_size() for tensor in state.local.values()) if several else 0
        )
        return _LocalState(
            state=state,
            files=files,
            shared=shared,
            changed=changed,
            extra=SpaceNeeded(
                sum(small) + sum(map(len, pickled.values())) + buffers * _IN_JSON,
                len(small) + _FILES_PER_PART * len(sharded) + _OTHER_FILES,
            ),
        )

    def _all_reduce(self, request: SaveRequest, local: _LocalState) -> tuple[bool, bool, int, SpaceNeeded]:
        """Return whether there is trouble, whether to plan, the moment, the most extra."""
        lead, failed = self._coordinator.is_coordinator, local.error is not None
        taken = lead and self._ownership.is_taken(request.name, replace=request.replace)
        created = int(time.time() * _MICROSECONDS) if lead else 0
        digest = request.digest() + self._options.replicas - 1
        # Only maxima can be reduced: the maximum and, negated, the minimum show whether all are equal.
        found = self._coordinator.all_reduce_max(
            [int(failed or taken), int(local.changed), digest, -digest, created, *local.extra],
            what=_AGREEING,
        )
        trouble = bool(found[0]) or found[2] != -found[3]
        return trouble, bool(found[1]), found[4], SpaceNeeded(*found[5:])

    def _clear_name(self, request: SaveRequest, error: BaseException | None) -> str:
        """Report this rank's error to all, or clear the name: see `Ownership.clear_name`."""

        def decide(requested: list[tuple[Any, ...]]) -> list[str]:
            if len(set(requested)) > 1:
                different = sorted(set(requested))
                raise ConfigError(f"ranks ask for different saves: {different}; all must ask for the same")
            name = self._ownership.clear_name(request.name, request.step, replace=request.replace)
            return [name] * len(requested)

        own = (request.step, request.name, *(["replicas=2"] if self._options.replicas > 1 else []))
        return self._coordinator.gather_scatter(error or own, decide, what=_AGREEING)

    def _stage(self, save: Save, local: _LocalState) -> None:
        plans, state = self._plans, local.state
        plans.raise_pending()
        if self._options.reject_non_finite:
            refuse_non_finite_in_files(state.in_files)
        if self._coordinator.world_size > 1:
            save.evidence = plans.evidence({name: local.shared.digest(name) for name in state.alike})
        if self._options.on_stale != "ignore" and self._trained[0] != plans.generation:
            self._trained = plans.generation, trained_slots(plans, state)
        save.trained = self._trained[1]
        if plans.keeping is not KeepOwn.NEVER or self._coordinator.is_coordinator:
            save.local = RankBuffers(state.local)
        stable = state.stable if self._options.staging == "overlapped" and state.optimizers else None
        save.staged = self._stager.stage(plans.parts, plans.generation, stable=stable)
        self._notes.log(state, plans, save.staged, self._job.storage.url)
        values = sum(
            len(content)
            for part in save.staged.values.values()
            for index, content in part.items()
            if not index.fqn.startswith(f"{PICKLED}.")  # counted already
        )
        ranks = self._coordinator.world_size  # all are assumed to have as many values
        save.extra = SpaceNeeded(ranks * (save.extra.size_bytes + values), ranks * save.extra.files)

    def _shared_file(self, items: EncodedItems) -> Mapping[str, bytes]:
        """Return this rank's file of shared items; few ranks but the coordinator have one."""
        names = self._plans.shared
        if self._coordinator.is_coordinator:
            return {SHARED: items.content_of(names)}
        return {shared_name(self._coordinator.rank): items.content_of(names)} if names else {}


def _offer(state: CapturedState, files: Collection[str], *, several: bool) -> Offer:
    groups: dict[str, GroupNames] = {}
    for part, path in state.groups if several else ():
        lists = get(state.sharded[part], path) or ()
        groups[part] = {**groups.get(part, {}), path: [tuple(each["params"]) for each in lists]}
    return Offer(
        rank_local=frozenset(state.local),
        files=frozenset(files),
        shared=frozenset(state.shared),
        groups=groups,
    )


def _kinds(state: CapturedState) -> dict[str, str]:
    kinds = dict.fromkeys(chain.from_iterable(state.sharded.values()), "sharded")
    kinds |= dict.fromkeys(state.shared, "shared") | dict.fromkeys(state.per_rank, "per_rank")
    if state.files:
        kinds["files"] = "files"
    return kinds
