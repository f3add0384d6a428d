"""The options of a manager as one frozen value, and those that name another place."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, Protocol, Self, TypeAlias, TypeVar, cast, final, get_args

from ckpt_core.disclosure import public_url
from ckpt_core.errors import ConfigError
from ckpt_core.options._parsing import (
    Headroom,
    Problems,
    option_keys,
    parse_headroom,
    policy_from,
    policy_problem,
    read_document,
    refused,
    undotted,
)
from ckpt_core.policies import RetentionPolicy, SavePolicy, is_of_kind
from ckpt_core.retention import Abandoned
from ckpt_core.validation import (
    boolean,
    function,
    imported,
    integer,
    location,
    mapping,
    one_of,
    parse_size,
    positive,
    require,
    text,
)

WhenBusy = Literal["overtake", "wait", "queue"]
OnPreemptionUpload = Literal["upload", "leave"]
OnUploadError = Literal["warn", "raise"]
UploadCodec = Literal["auto", "zstd", "planes"]
ExportWhen: TypeAlias = Literal["best", "final"] | Mapping[str, int]


class OpenedPlace(Protocol):
    """An opened store of bytes: a `Storage`."""

    @property
    def url(self) -> str:
        """The absolute path or URL, for messages."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Upload:
    """A further tier of the root: checkpoints are copied there in the background.

    Attributes:
        to: directory (a second disk, a mounted share), fsspec URL (`s3://bucket/run`) or `Storage`. It is a
            root of its own, which stock DCP and `ckpt` read without the first one.
        every: upload every n-th checkpoint of a run, counted over restarts. Saves at a preemption are not
            counted. The last one before `close()` is uploaded in any case.
        keep: which checkpoints a prune keeps there; None never prunes there.
        bandwidth: the most bytes per second that the job uploads (with disks of nodes: each node), as a
            number or "500 MB/s"; None for no limit. It does not count as `write_bandwidth`, nor that as it.
        when_busy: what to do when a checkpoint becomes due while an upload runs: `overtake` those that wait
            for their turn, so that the newest is next; `wait`: the next save waits until none waits; or
            `queue` all of them. Whatever waits is not pruned.
        on_preemption: whether `close()` waits for uploads after a preemption (`upload`), or leaves the rest
            to the next run (`leave`).
        deadline_seconds: the longest wait of `close()` for uploads, and the longest time for which a failed
            upload is tried again.
        on_error: whether an upload that failed for good is only reported (`warn`), or stops the training at
            the next save (`raise`).
        compress: how the copies are compressed, losslessly: by `zstd`, which stock DCP reads; by `planes`,
            which makes them smaller and which only this package reads; `auto`, for each class of tensors
            whichever is there soonest, also as it is; None for not at all. What does not shrink stays as it
            is. It needs `pip install "ckpt-suite[compress]"`.
        storage_options: passed to the filesystem behind `to`, as those of the root to its own. No repr, error
            or log shows their values.
        url: `to` without secrets; a directory by its absolute path.
    """

    to: str | os.PathLike[str] | OpenedPlace = field(repr=False)
    every: int = field(default=1, kw_only=True)
    keep: RetentionPolicy | None = field(default=None, kw_only=True)
    bandwidth: float | str | None = field(default=None, kw_only=True)
    when_busy: WhenBusy = field(default="overtake", kw_only=True)
    on_preemption: OnPreemptionUpload = field(default="upload", kw_only=True)
    deadline_seconds: float = field(default=600.0, kw_only=True)
    on_error: OnUploadError = field(default="warn", kw_only=True)
    compress: UploadCodec | None = field(default=None, kw_only=True)
    storage_options: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True, repr=False)
    # Fixed when the option is made: the process may change its directory, and `tiers.json` is read in others.
    url: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(
            "Upload",
            _place(self.to),
            integer("every", self.every, minimum=1),
            policy_problem("keep", self.keep, RetentionPolicy),
            refused(parse_size, "bandwidth", self.bandwidth, rate=True),
            one_of("when_busy", self.when_busy, get_args(WhenBusy)),
            one_of("on_preemption", self.on_preemption, get_args(OnPreemptionUpload)),
            positive("deadline_seconds", self.deadline_seconds),
            one_of("on_error", self.on_error, get_args(OnUploadError)),
            None if self.compress is None else one_of("compress", self.compress, get_args(UploadCodec)),
            'compress needs pip install "ckpt-suite[compress]", which is not installed'
            if self.compress is not None and find_spec("zstandard") is None
            else None,
            option_keys("storage_options", self.storage_options),
        )
        object.__setattr__(self, "url", _absolute(self.to))

    def __repr__(self) -> str:
        # A URL may hold credentials.
        others = (each.name for each in fields(self) if each.repr)
        return f"Upload({self.url!r}, {', '.join(f'{name}={getattr(self, name)!r}' for name in others)})"

    @property
    def bytes_per_second(self) -> int | None:
        """`bandwidth` in bytes per second."""
        return parse_size("bandwidth", self.bandwidth, rate=True)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Weights of a run in a format of others, written in the background.

    Attributes:
        to: the format, as in `ckpt export --to`, such as `hf`.
        place: directory or URL (`s3://bucket/weights`, `hf://user/repo`); each export is a directory
            `step-000000500` in it, and `exports.json` there lists those that are whole.
        when: `final`: the last checkpoint, when the training ends; `best`: each one that is the best when it
            is committed, by the metric of `keep`; or `{"every": 10}`: every tenth checkpoint of a run, as for
            an `Upload`. Where one becomes due while another is written, the newest is next.
        dtype: `bf16`, `fp16` or `fp32` for all floating weights; None for their own.
        keep: how many exports stay in `place`, the newest; None for all.
        like: a folder with `config.json` and tokenizer; None for what the host saved in the checkpoint.
        adapters: what becomes of adapters of PEFT: `keep` writes them alone, `merge` the model with them.
        deadline_seconds: the longest wait of `close()`; what is not written by then is left to the next run.
            After a preemption nothing is waited for.
        storage_options: passed to the filesystem behind `place`. No repr, error or log shows their values.
    """

    to: str
    place: str | os.PathLike[str] = field(repr=False)
    when: ExportWhen = "final"
    dtype: str | None = None
    keep: int | None = None
    like: str | os.PathLike[str] | None = None
    adapters: str | None = None
    deadline_seconds: float = 600.0
    storage_options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    # Fixed when the option is made: the process may change its directory.
    url: str = field(default="", init=False)

    def __post_init__(self) -> None:
        require(
            "Export",
            text("to", self.to),
            location("place", self.place),
            _when_problem(self.when),
            None if self.dtype is None else one_of("dtype", self.dtype, ("bf16", "fp16", "fp32")),
            None if self.keep is None else integer("keep", self.keep, minimum=1),
            None if self.like is None else location("like", self.like),
            None if self.adapters is None else one_of("adapters", self.adapters, ("keep", "merge")),
            positive("deadline_seconds", self.deadline_seconds),
            option_keys("storage_options", self.storage_options),
        )
        object.__setattr__(self, "url", _absolute(self.place))

    @property
    def every(self) -> int | None:
        """`n` of `{"every": n}`; else None."""
        return None if isinstance(self.when, str) else self.when["every"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class InitialWeights:
    """What `CheckpointManager.load` is asked for; see its arguments."""

    place: str = field(repr=False)
    rename: Mapping[str, str] = field(default_factory=dict[str, str])
    strict: bool = True
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """Read the option, a place or these fields, None for None; ConfigError if wrong."""
        if value is None:
            return None
        given = value if isinstance(value, Mapping) else {"place": value}
        problems = Problems()
        problems.unknown("init_from", given, [each.name for each in fields(cls)])
        problems.raise_if_any()
        require(
            "init_from",
            location("place", given.get("place")),
            mapping("rename", given.get("rename", {})),
            boolean("strict", given.get("strict", True)),
            option_keys("storage_options", given.get("storage_options") or {}),
        )
        return cls(**{**given, "place": os.fspath(given["place"])})


Uploads: TypeAlias = Upload | Sequence[Upload]
Exports: TypeAlias = Export | Sequence[Export]
_NEEDED: Final[Mapping[type, Mapping[str, str]]] = {
    Upload: {"to": "the directory or URL to upload to"},
    Export: {"to": "the format, such as hf", "place": "the directory or URL that it is written to"},
}


def further_from(kind: type[Any], value: Any, where: str) -> Any:
    """Build uploads or exports from plain values: a mapping, or a list of them.

    A value alone is its field `to`.

    Raises:
        ConfigError: invalid ones; the message lists all of them.
    """
    problems = Problems()
    if isinstance(value, list | tuple):
        parts = [(kind, each, f"{where}[{index}]") for index, each in enumerate(value)]
        found = [problems.collect(further_from, *part) for part in parts]
        problems.raise_if_any()
        return found
    if isinstance(value, kind):
        return value
    value = undotted(value if isinstance(value, Mapping) else {"to": value})
    names = [each.name for each in fields(kind) if each.init]
    problems.unknown(where, value, names)
    lacking = {name: what for name, what in _NEEDED[kind].items() if name not in value}
    for name, what in lacking.items():
        problems.add(f"{where}: {name!r} is missing, {what}")
    values = {name: value[name] for name in names if name in value}
    if kind is Upload and values.get("keep") is not None:
        values["keep"] = problems.collect(policy_from, values["keep"], "keep", prefix=f"{where}.")
    made = None if lacking else problems.collect(lambda: kind(**values), prefix=f"{where}: ")
    problems.raise_if_any()
    return made


def problem_of_several(name: str, value: Any, kind: type) -> str | None:
    each = value if isinstance(value, list | tuple) else () if value is None else (value,)
    wrong = sorted({type(one).__name__ for one in each if not isinstance(one, kind)})
    if wrong:
        known = f"an {kind.__name__} or several"
        return f"{name} must be {known}, not {', '.join(wrong)} (plain values: from_mapping)"
    return None


def _absolute(to: str | os.PathLike[str] | OpenedPlace) -> str:
    """Return a place without secrets; a directory by its absolute path."""
    if not isinstance(to, str | os.PathLike):
        return public_url(to.url)
    text = os.fspath(to)
    if "://" in text:
        return public_url(text)
    with suppress(RuntimeError):  # no home: the root's storage refuses it
        text = str(Path(text).expanduser())
    return str(Path(text).absolute())


def _place(value: Any) -> str | None:
    if isinstance(value, str | os.PathLike):
        text: Any = os.fspath(value)
        return None if isinstance(text, str) and text.strip() else "to is empty; give a directory or a URL"
    if isinstance(getattr(value, "url", None), str):
        return None
    return f"to must be a directory, a URL or a Storage, not {type(value).__name__}"


def _when_problem(value: Any) -> str | None:
    if isinstance(value, Mapping) and list(value) == ["every"]:
        return integer("when: every", value["every"], minimum=1)
    if value in ("best", "final"):
        return None
    return f'when must be "best", "final" or {{"every": n}}, not {value!r}'


BackPressure = Literal["wait", "skip"]
OnError = Literal["raise", "warn"]
Staging = Literal["blocking", "overlapped"]
Verify = Literal["full", "read", "arrival", "off"]
OnDivergence = Literal["refuse", "warn", "keep-each"]
OnStale = Literal["warn", "refuse", "ignore"]
Checksums = Literal["crc32", "sha256"]
SignManifest: TypeAlias = Callable[[str, bytes], bytes]
"""A function that signs: checkpoint name, bytes of `manifest.json` -> a detached signature."""
VerifyManifest: TypeAlias = Callable[[str, bytes, bytes], bool]
"""A function that judges: name, bytes of `manifest.json`, signature or b"" -> whether it may be used."""

_WORDS: Final[Mapping[str, Any]] = {
    "abandoned": Abandoned,
    "back_pressure": BackPressure,
    "staging": Staging,
    "on_error": OnError,
    "on_divergence": OnDivergence,
    "on_stale": OnStale,
    "checksum": Checksums,
}
_MANNER: Final = frozenset(
    {
        *("back_pressure", "arenas", "staging", "staging_memory", "write_bandwidth", "headroom", "on_error"),
        *("writers", "priority"),
        *("sign_manifest", "verify_manifest", "verify", "deadline_seconds"),
        *("storage_options", "replicas", "upload", "export", "journal", "on_exception", "on_stale"),
        "init_from",
    }
)
"""Options that say how saves and loads are done, not what they hold."""
_ENDS: Final = ("on_exception",)
"""Options of hosts that see what ends the training: no others show them, or take them."""

SECTION = "checkpoint"
"""The top-level key of our options in a file with other content."""
_Call = TypeVar("_Call", bound=Callable[..., Any])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """The behaviour of a `CheckpointManager`.

    Attributes:
        save: when to save; a policy, or plain values such as `{every_steps: 500, on_preemption: true}`; None:
            only explicit calls save.
        keep: which checkpoints a prune keeps; a policy, or plain values such as `{latest: 3, best: {metric:
            val_loss}}`; None never prunes.
        upload: a further tier of the root, or several, where every n-th checkpoint is copied in the
            background: an `Upload`, or plain values such as `{to: "s3://bucket/run", every: 10, keep:
            {latest: 3}}`. None for the root alone.
        export: weights in a format of others, written from committed checkpoints by a process beside the
            training: an `Export`, or plain values such as `{to: hf, place: "s3://bucket/weights", when: best,
            dtype: bf16}`, or several. None for none.
        abandoned: what a prune does with abandoned checkpoints, from which the present lineage does not
            continue because training restarted or went back: `keep` them, or `prune` the unpinned ones, the
            oldest first, as checkpoints of the present lineage take the places of the `keep` policy. With
            `keep` as None it has no effect.
        back_pressure: what to do when a save is due and every arena is in flight: `wait` for the oldest, or
            `skip` the save.
        arenas: the number of saves that may be in flight, 1 or 2; each has its copy of this rank's share of
            the state in host memory, allocated when it is first needed.
        staging_memory: the most host memory, in bytes or as "512 MiB", for all arenas of one rank; None for
            the free memory at the time of allocation, less a headroom (5 %, at least 512 MiB). Ranks of one
            machine do not see what the others are about to allocate: there a number is safer. A larger share
            is saved in waves, for which training waits.
        write_bandwidth: the most bytes per second that one rank writes, as a number or as "500 MB/s"; None
            for no limit.
        writers: the number of threads that write one file at the same time, on local filesystems only; None
            for 2, which keep one disk busy. More help where a disk or a parallel filesystem is faster.
        priority: how far the threads of a save give way to the training and all else on the machine, from 0,
            not at all, to 19: the nice value, on Linux, of those that copy, hash and write. The training's
            own thread never changes, nor do the copies in which it takes part.
        headroom: the space that a save leaves free on the filesystem of the root, in bytes, as "2 GiB" or as
            "5 %"; None for 1 %, at most 1 GiB. A save that would leave less is refused before it writes,
            unless there is enough space once checkpoints are removed that `keep` would drop after it anyway.
        staging: whether a save returns after the state is copied (`blocking`), or earlier, so that parameters
            and optimizer state are copied during forward and backward (`overlapped`): then only the
            optimizers' steps may change them until the handle's `staged` is done or the manager's
            `wait_staged` has returned. In Lightning no hook may during the batch after a save.
        reject_non_finite: whether a save fails, and commits nothing, if a weight or a value of an optimizer's
            state, or the metric `loss`, is NaN or infinite. Module buffers are not checked. With
            `on_error="warn"` training continues, and the last finite checkpoint remains the newest.
        on_error: whether a failed background save stops the training or is only reported.
        on_divergence: what to do when ranks hold different values under one name: fail on all ranks
            (`refuse`); save all values of the lowest rank and warn once (`warn`); or save every rank's
            values, for a resume on the same number of ranks (`keep-each`), which takes the space of all.
        on_stale: what to do with a save of a later step in which no trained parameter, or nothing of the
            optimizer's state, has changed since the one before: `warn` once, `refuse` it on all ranks, or
            `ignore` it. By the checksums of a state with an optimizer; frozen parameters do not count.
        checksum: of the files of a save, in the manifest: `crc32` detects faults of storage, `sha256` also
            changes on purpose. Tensors have a CRC-32 of their own either way.
        replicas: the number of files that hold the same bytes, 1 or 2. With 2 every file of a save has a
            second one, `NAME.replica`, written by a rank of another host where there is one; a load reads
            from it what is lost or damaged in the first. A save takes twice the space.
        sign_manifest: a function, or its import path as "package.module:function": called with the name of
            the checkpoint and the bytes of `manifest.json` before the marker is written, on the coordinator's
            save thread. Its result is stored beside as `manifest.json.sig`; an exception fails the save.
        verify_manifest: a function, or its import path, for loads: called on the coordinator, before any
            other file of a checkpoint is used, with its name, the bytes of `manifest.json` and of
            `manifest.json.sig` (b"" if there is none). Unless it returns True the checkpoint is refused, and
            `resume` skips it; an OSError means that it cannot decide now, and ends the load.
        verify: which bytes are compared with their checksums before anything live changes: those to be loaded
            and, on a local filesystem, those around them (`read`), the whole checkpoint (`full`), or only the
            small files (`off`). `arrival` is `read` on a local filesystem; from an object store tensors are
            compared as they arrive, in the memory of the model: damage that a second try finds, too, leaves
            it partly overwritten, and `resume` goes on with an older checkpoint, which overwrites all of it.
            None means `arrival` for `resume` and `read` for `load`. True means `read`, False means `off`, as
            YAML reads that word.
        allow_pickle: whether loading may execute pickles, which can run any code: what is no plain value, in
            hooks, `hparams` and registered objects, is saved as one, with a warning.
        deadline_seconds: the longest wait of ranks for one another.
        journal: whether the coordinator keeps a journal of this run in the root: what its saves, loads and
            prunes cost, and how it ended. No save waits for them, or fails with them.
        storage_options: passed to the filesystem behind a URL, e.g. an endpoint; `request_seconds` and
            `conditional_writes` belong to `object_storage`. No repr, error or log shows their values.
        on_exception: `save` commits the last whole step when an exception ends the training on all ranks, at
            the cost of a capture of the state at every step; None leaves it to the last save before.
        init_from: the weights with which the run begins where it resumes nothing, cast to the model's dtypes:
            a folder or file as of `load(source=...)`, or `{place: ..., rename: {...}, strict: false,
            storage_options: {...}}`. What was matched, missing and unexpected is logged once.
    """

    save: SavePolicy | None = None
    keep: RetentionPolicy | None = None
    upload: Uploads | None = None
    export: Exports | None = None
    abandoned: Abandoned = "keep"
    back_pressure: BackPressure = "wait"
    arenas: int = 1
    staging_memory: int | str | None = None
    write_bandwidth: float | str | None = None
    writers: int | None = None
    priority: int = 10
    headroom: float | str | None = None
    staging: Staging = "blocking"
    reject_non_finite: bool = False
    on_error: OnError = "raise"
    on_divergence: OnDivergence = "refuse"
    on_stale: OnStale = "warn"
    checksum: Checksums = "crc32"
    replicas: int = 1
    # Not shown: a function may be bound to a key.
    sign_manifest: SignManifest | str | None = field(default=None, repr=False)
    verify_manifest: VerifyManifest | str | None = field(default=None, repr=False)
    verify: Verify | bool | None = None
    allow_pickle: bool = False
    deadline_seconds: float = 1800.0
    journal: bool = True
    storage_options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    on_exception: Literal["save"] | None = None
    # Not shown: a URL may hold credentials.
    init_from: str | os.PathLike[str] | Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require(
            "CheckpointOptions",
            policy_problem("save", self.save, SavePolicy),
            policy_problem("keep", self.keep, RetentionPolicy),
            problem_of_several("upload", self.upload, Upload),
            problem_of_several("export", self.export, Export),
            _no_upload(self.save, self.upload),
            integer("arenas", self.arenas, minimum=1, maximum=2),
            refused(parse_size, "staging_memory", self.staging_memory),
            refused(parse_size, "write_bandwidth", self.write_bandwidth, rate=True),
            None if self.writers is None else integer("writers", self.writers, minimum=1, maximum=64),
            integer("priority", self.priority, minimum=0, maximum=19),
            refused(parse_headroom, self.headroom),
            *(one_of(name, getattr(self, name), get_args(words)) for name, words in _WORDS.items()),
            integer("replicas", self.replicas, minimum=1, maximum=2),
            None if self.sign_manifest is None else function("sign_manifest", self.sign_manifest),
            None if self.verify_manifest is None else function("verify_manifest", self.verify_manifest),
            _verify(self.verify),
            *(
                boolean(name, getattr(self, name))
                for name in ("reject_non_finite", "allow_pickle", "journal")
            ),
            positive("deadline_seconds", self.deadline_seconds),
            option_keys("storage_options", self.storage_options),
            None if self.on_exception is None else one_of("on_exception", self.on_exception, ("save",)),
            refused(InitialWeights.of, self.init_from),
        )

    @property
    def verification(self) -> Verify:
        """`verify` as one of its words, for all but `resume`."""
        if self.verify is None:
            return "read"
        if isinstance(self.verify, bool):
            return "read" if self.verify else "off"
        return self.verify

    @property
    def resume_verification(self) -> Verify:
        """`verify` as one of its words, for `resume`."""
        return "arrival" if self.verify is None else self.verification

    @property
    def manifest_signer(self) -> SignManifest | None:
        """`sign_manifest` as a function; ConfigError if it cannot be imported."""
        return None if self.sign_manifest is None else imported("sign_manifest", self.sign_manifest)

    @property
    def manifest_verifier(self) -> VerifyManifest | None:
        """`verify_manifest` as a function; ConfigError if it cannot be imported."""
        return None if self.verify_manifest is None else imported("verify_manifest", self.verify_manifest)

    @property
    def staging_memory_bytes(self) -> int | None:
        """`staging_memory` in bytes."""
        return parse_size("staging_memory", self.staging_memory)

    @property
    def write_bytes_per_second(self) -> int | None:
        """`write_bandwidth` in bytes per second."""
        return parse_size("write_bandwidth", self.write_bandwidth, rate=True)

    @property
    def free_headroom(self) -> Headroom:
        """`headroom` as a `Headroom`."""
        return parse_headroom(self.headroom)

    @property
    def counts(self) -> frozenset[str]:
        """The counts that its policies need: `epochs`, `tokens`, `total_steps`."""
        keeps = [self.keep, *(each.keep for each in self.uploads)]
        return frozenset[str]().union(*(each.counts for each in [self.save, *keeps] if each is not None))

    @property
    def uploads(self) -> tuple[Upload, ...]:
        """The further tiers, the nearest first."""
        given = () if self.upload is None else self.upload
        return (given,) if isinstance(given, Upload) else tuple(given)

    @property
    def exports(self) -> tuple[Export, ...]:
        """What is written in formats of others."""
        given = () if self.export is None else self.export
        return (given,) if isinstance(given, Export) else tuple(given)

    @property
    def initial_weights(self) -> InitialWeights | None:
        """`init_from` as a value."""
        return InitialWeights.of(self.init_from)

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that decide what is saved and kept, if they are not the defaults."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _MANNER}
        stock = type(self)()
        return {name: value for name, value in own.items() if value != getattr(stock, name)}

    @classmethod
    def described(cls) -> dict[str, str]:
        """Return what the docstring says of each option."""
        told = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]  # 3.13 has it cleaned
        names = "|".join(option.name for option in fields(cls))
        parts = re.split(rf"^ {{4}}({names}): ", told, flags=re.MULTILINE)[1:]
        return {name: text.rstrip() for name, text in zip(parts[::2], parts[1::2], strict=True)}

    def refuse_ends(self, host: str) -> None:
        """Refuse, by a ConfigError, what only a host that sees the end can do."""
        for name in _ENDS:
            if (value := getattr(self, name)) is not None:
                raise ConfigError(f"{name}={value!r}: {host} does not see what ends the training")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Build options from plain values, as in a YAML or TOML file.

        Raises:
            ConfigError: invalid options; the message lists all of them.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"checkpoint options must be a mapping, not {type(mapping).__name__}")
        names = [option.name for option in fields(cls)]
        problems = Problems()
        problems.unknown("checkpoint options", mapping, names, options=True)
        values = {name: mapping[name] for name in names if name in mapping}
        for kind in ("save", "keep"):
            value = values.pop(kind, None)
            if value is not None:
                values[kind] = problems.collect(policy_from, value, kind)
        for name, further in (("upload", Upload), ("export", Export)):
            if values.get(name) is not None:
                values[name] = problems.collect(further_from, further, values[name], name)
        options = problems.collect(partial(cls, **values))
        problems.raise_if_any()
        return cast("Self", options)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read options from a `.toml`, `.yaml` or `.yml` file.

        They are the whole file, or its section `checkpoint`.

        Raises:
            ConfigError: the file cannot be read or an option is invalid.
        """
        document = read_document(Path(path))
        try:
            return cls.from_mapping(document.get(SECTION, document))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def signature_with_options(call: Callable[..., Any], *, ends: bool = True, **own: Any) -> inspect.Signature:
    """Return a call's signature with its `own` and all options for `**options`."""
    found, options = inspect.signature(call), inspect.signature(CheckpointOptions)
    named = [p for p in found.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name != "self"]
    further = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=own[name]) for name in own]
    left_out = {*found.parameters, *(() if ends else _ENDS)}
    others = [each for each in options.parameters.values() if each.name not in left_out]
    return found.replace(parameters=[*named, *further, *others])


def shows_options(*, ends: bool = True, **own: Any) -> Callable[[_Call], _Call]:
    """Make a decorator that gives a function `signature_with_options`."""

    def decorate(call: _Call) -> _Call:
        vars(call)["__signature__"] = signature_with_options(call, ends=ends, **own)
        return call

    return decorate


def _no_upload(save: Any, upload: Any) -> str | None:
    """Return the problem of a policy that waits for a tier that the run does not have."""
    if upload or not is_of_kind(save, SavePolicy) or not save.needs_upload:
        return None
    return f'{save!r} looks at what the first upload tier has: give upload=, or take tier="root"'


def _verify(value: Any) -> str | None:
    return None if value is None or isinstance(value, bool) else one_of("verify", value, get_args(Verify))
