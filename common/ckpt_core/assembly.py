"""Make the parts of one manager, in the order in which they need each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, final

from ckpt_core.collective import SameOptions
from ckpt_core.coordination import Coordinator, coordinator_for_job
from ckpt_core.disclosure import public_url
from ckpt_core.groups import open_root
from ckpt_core.journal import Journal
from ckpt_core.loading import Fetcher, Loader, Repairer
from ckpt_core.measuring import CostMeter
from ckpt_core.options import CheckpointOptions, given_options
from ckpt_core.preemption import CadenceKeeper
from ckpt_core.root import Job, Ownership, Pruner
from ckpt_core.saving import Saver, SaveThread
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Sink, Telemetry
from ckpt_core.tiers import RunCatalog, open_tiers
from ckpt_core.tiers.uploading import RunExports, TierUploads


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """The parts of a `CheckpointManager`; none works before its first call."""

    job: Job
    catalog: RunCatalog
    same_options: SameOptions
    cadence: CadenceKeeper
    meter: CostMeter
    journal: Journal
    uploads: TierUploads
    root: Ownership
    pruner: Pruner
    saver: Saver
    loader: Loader
    repairer: Repairer
    fetcher: Fetcher

    @classmethod
    def of(
        cls,
        root: str | os.PathLike[str] | Storage,
        options: CheckpointOptions,
        coordinator: Coordinator | None,
        *,
        sinks: Sequence[Sink],
        listen: bool,
        exporter: str,
    ) -> Self:
        """Make the parts; see `CheckpointManager`.

        `exporter` is the "package.module:function" that writes an export, which only its process imports.

        Raises:
            ConfigError: an option is wrong, or the extra for the URL is not installed.
        """
        deadline = options.deadline_seconds
        storage = open_root(root, options.storage_options, deadline_seconds=deadline)
        coordinator = coordinator or coordinator_for_job(deadline_seconds=deadline)
        tiers = open_tiers(storage, options)
        catalog = RunCatalog(tiers)
        journal = Journal(storage, [tier.storage for tier in tiers[1:]], enabled=options.journal)
        telemetry = Telemetry(*sinks, *journal.sinks)
        job = Job(storage=storage, coordinator=coordinator, telemetry=telemetry)
        uploads = TierUploads(job, options, tiers, RunExports(job, options, exporter))
        thread = SaveThread(deadline)
        ownership = Ownership(
            storage,
            coordinator,
            until_idle=thread.until_idle,
            hooks=replace(uploads.hooks, journal=journal),
            elsewhere=uploads.claim,
        )
        pruner = Pruner(storage, options, ownership=ownership, telemetry=job.telemetry)
        saver = Saver(job, thread, options, ownership=ownership, pruner=pruner)
        meter = CostMeter(job.telemetry, coordinator, saver)
        cadence = CadenceKeeper(
            options.save,
            coordinator,
            listen=listen,
            measured=meter,
            failures=lambda: journal.failures(coordinator.world_size),
        )
        cadence.report = partial(telemetry.point, "cadence")
        waited_for = (each.deadline_seconds for each in options.uploads if each.on_preemption == "upload")
        cadence.upload_seconds = next(waited_for, 0.0)
        return cls(
            job=job,
            same_options=SameOptions(coordinator, {"root": _place(storage), **given_options(options)}),
            catalog=catalog,
            cadence=cadence,
            meter=meter,
            journal=journal,
            uploads=uploads,
            root=ownership,
            pruner=pruner,
            saver=saver,
            loader=Loader(job, tiers=tiers, verify_manifest=options.manifest_verifier),
            repairer=Repairer(job, tiers[0], options, ownership=ownership, pruner=pruner),
            fetcher=Fetcher(job, tiers, options, ownership),
        )


def _place(storage: Storage) -> str:
    """Return what ranks must have in common of their roots.

    Nodes may mount one directory in different places, or have disks of their own: who sees whose files is
    found out when the root is taken.
    """
    return public_url(storage.url) if "://" in storage.url else "a directory"
