"""The one set of options that the callback and the plugin share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, final

from ckpt_core.cadence import SavePolicy
from ckpt_core.errors import ConfigError
from ckpt_core.options import (
    BackPressure,
    CheckpointOptions,
    Checksums,
    OnDivergence,
    OnError,
    SignManifest,
    Staging,
    Verify,
    VerifyManifest,
)
from ckpt_core.retention import Abandoned, AllOf, AnyOf, KeepBest, RetentionPolicy
from ckpt_core.storage import Storage, open_storage
from ckpt_core.telemetry import Sink
from ckpt_core.validation import boolean, require
from lightning_ckpt._places import real_root
from lightning_ckpt._spellings import problem_of_root, unknown_options


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a person asked for, validated.

    Attributes:
        root: where the run's own checkpoints go; None if only Lightning's own callers save.
        options: of the manager of that root.
        save_last: whether the last step of a training is saved whatever the save policy says.
        storage: what was given as the root, if not a path or URL.
        sinks: receivers of telemetry events.
    """

    root: str | None = field(repr=False)
    options: CheckpointOptions
    save_last: bool
    storage: Storage | None = None
    sinks: Sequence[Sink] = ()

    @property
    def bests(self) -> tuple[KeepBest, ...]:
        """The policies that rank checkpoints by a metric."""
        return tuple(_bests(self.options.keep))

    @property
    def best(self) -> KeepBest | None:
        """The policy that says which checkpoint is the best; the first if there are several."""
        return next(iter(self.bests), None)

    def for_root(self, root: str, *, training: bool) -> CheckpointOptions:
        """The options of the manager of `root`: the save policy is for the run's own root while it trains.

        Outside a fit nobody would act on a preemption, so nothing may catch its signal. Whoever asks for a
        save by path (a `ModelCheckpoint`, the user) believes that one which returned was made, so none is
        skipped; outside the run's own root they also decide what stays.
        """
        options = self.options
        if not training or root != self.root:
            options = replace(options, save=None, back_pressure="wait")
        if root != self.root:
            options = replace(options, keep=None)
        return options if "://" in root else replace(options, storage_options={})

    def given(self, root: str) -> str | Storage:
        """The root as it was given."""
        return self.storage if self.storage is not None and root == self.root else root

    def storage_at(self, root: str) -> Storage:
        """The bytes at a root or path."""
        return open_storage(self.given(root), self.for_root(root, training=False).storage_options)


def _bests(policy: RetentionPolicy | None) -> Iterator[KeepBest]:
    if isinstance(policy, KeepBest):
        yield policy
    elif isinstance(policy, AnyOf | AllOf):
        for member in policy.policies:
            yield from _bests(member)


def _path_of(dirpath: str | Path | Storage) -> str | Path:
    return dirpath.url if isinstance(dirpath, Storage) else dirpath


class Configured:
    """Something that takes our options.

    Args:
        dirpath: directory, fsspec URL (`s3://bucket/run`) or `Storage` of the run's checkpoints.
        save: when to save; a policy, or plain values such as `{every_steps: 500, on_preemption: true}`.
        keep: what to keep; a policy, or plain values such as `{latest: 3, best: {metric: val_loss}}`.
        save_last: whether to save the last step of a training, too.
        abandoned: what `keep` does with checkpoints that the run does not go on from, because it was begun
            afresh or went back: `keep` or `prune` them.
        back_pressure: what a save that is due does while every arena is in flight: `wait` for it, `skip`, or
            `coalesce`: be made up for, all of them by one, as soon as an arena is free.
        arenas: how many saves may be in flight at once, 1 or 2; each takes host memory for its copy.
        staging_memory: the most host memory for copies on one rank, in bytes or as "512 MiB"; None for what
            is free.
        write_bandwidth: the most bytes per second that one rank writes, as a number or as "500 MB/s".
        headroom: what a save leaves free on the disk of `dirpath`, in bytes, as "2 GiB" or as "5 %"; None for
            1 %, at most 1 GiB.
        staging: whether training waits for the copy (`blocking`), or only the next optimizer step does
            (`overlapped`): then no hook may change weights during the batch after a save.
        reject_non_finite: whether a save of NaN or infinite weights, or of such a `loss`, fails.
        on_error: whether a failed background save stops the training (`raise`) or is only reported (`warn`).
        on_divergence: what a save does when ranks hold different values under one name: fail (`refuse`), save
            the lowest rank's (`warn`) or every rank's own (`keep-each`).
        checksum: of the files of a save: `crc32` finds what storage does to them, `sha256` also what people
            do.
        sign_manifest: signs what is about to be committed, as in `CheckpointOptions`; a function, or where to
            import one from, as "package.module:function".
        verify_manifest: the same, to judge what is about to be loaded; unless it returns True it is refused.
        verify: what is compared with its checksums before a load changes anything: `read` (what will be
            used), `full` (all of it) or `off`.
        read_once: whether bytes that several ranks need are read by one of them, which passes them on.
        allow_pickle: whether loading may execute pickles, which can run any code.
        deadline_seconds: how long ranks wait for one another before they give up.
        job_name: what `writer.json` calls this job, instead of its script, host and process.
        storage_options: passed to the filesystem behind a URL, e.g. an endpoint.
        sinks: receivers of telemetry events.

    Raises:
        ConfigError: an option is wrong; the message lists every offender.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Refuse options that there are not, in the words of whoever comes from a `ModelCheckpoint`.

        Not in `__init__`, whose signature tells LightningCLI what there is.

        Raises:
            ConfigError: there is no such option.
        """
        del arguments
        known = inspect.signature(cls.__init__).parameters.keys() - {"self"}
        require(cls.__name__, *unknown_options(options, known))
        return super().__new__(cls)

    # Every argument is one that LightningCLI shows and YAML may set.
    def __init__(  # noqa: PLR0913
        self,
        dirpath: str | Path | Storage | None = None,
        *,
        save: SavePolicy | dict[str, Any] | list[Any] | None = None,
        keep: RetentionPolicy | dict[str, Any] | list[Any] | None = None,
        save_last: bool = True,
        abandoned: Abandoned = "keep",
        back_pressure: BackPressure = "wait",
        arenas: int = 1,
        staging_memory: int | str | None = None,
        write_bandwidth: float | str | None = None,
        headroom: float | str | None = None,
        staging: Staging = "blocking",
        reject_non_finite: bool = False,
        on_error: OnError = "raise",
        on_divergence: OnDivergence = "refuse",
        checksum: Checksums = "crc32",
        sign_manifest: SignManifest | str | None = None,
        verify_manifest: VerifyManifest | str | None = None,
        verify: Verify | bool = "read",
        read_once: bool = True,
        allow_pickle: bool = False,
        deadline_seconds: float = 1800.0,
        job_name: str | None = None,
        storage_options: dict[str, Any] | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        require(
            type(self).__name__,
            None if dirpath is None or isinstance(dirpath, Storage) else problem_of_root(dirpath),
            boolean("save_last", save_last),
        )
        if dirpath is None and not (save is None and keep is None):
            raise ConfigError("save= and keep= need dirpath=, the directory or URL of the run's checkpoints")
        values = {
            "save": save,
            "keep": keep,
            "abandoned": abandoned,
            "back_pressure": back_pressure,
            "arenas": arenas,
            "staging_memory": staging_memory,
            "write_bandwidth": write_bandwidth,
            "headroom": headroom,
            "staging": staging,
            "reject_non_finite": reject_non_finite,
            "on_error": on_error,
            "on_divergence": on_divergence,
            "checksum": checksum,
            "sign_manifest": sign_manifest,
            "verify_manifest": verify_manifest,
            "verify": verify,
            "read_once": read_once,
            "allow_pickle": allow_pickle,
            "deadline_seconds": deadline_seconds,
            "job_name": job_name,
            "storage_options": storage_options or {},
        }
        storage = dirpath if isinstance(dirpath, Storage) else None
        self.settings = Settings(
            root=None if dirpath is None else real_root(_path_of(dirpath)),
            options=CheckpointOptions.from_mapping(values),
            save_last=save_last,
            storage=storage,
            sinks=sinks,
        )
