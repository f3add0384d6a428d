# SPDX-License-Identifier: Apache-2.0
"""Options that name another place: `upload`, `export` and `init_from`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, Protocol, Self, TypeAlias, final, get_args

from ckpt_core.disclosure import public_url
from ckpt_core.options._parsing import Problems, option_keys, policy_problem, refused, undotted
from ckpt_core.options._policies import policy_from
from ckpt_core.policies import RetentionPolicy
from ckpt_core.validation import (
    boolean,
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
