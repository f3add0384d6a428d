"""The option `upload`: further tiers, and how checkpoints come there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias, cast, final, get_args

from ckpt_core.disclosure import public_url
from ckpt_core.errors import ConfigError
from ckpt_core.options._parsing import Problems, option_keys, policy_problem, refused, undotted
from ckpt_core.options._policies import policy_from
from ckpt_core.policies import RetentionPolicy
from ckpt_core.validation import integer, one_of, parse_size, positive, require

WhenBusy = Literal["overtake", "wait", "queue"]
OnPreemptionUpload = Literal["upload", "leave"]
OnUploadError = Literal["warn", "raise"]


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
        storage_options: passed to the filesystem behind `to`, as those of the root to its own. No repr, error
            or log shows their values.
    """

    to: str | os.PathLike[str] | OpenedPlace = field(repr=False)
    every: int = field(default=1, kw_only=True)
    keep: RetentionPolicy | None = field(default=None, kw_only=True)
    bandwidth: float | str | None = field(default=None, kw_only=True)
    when_busy: WhenBusy = field(default="overtake", kw_only=True)
    on_preemption: OnPreemptionUpload = field(default="upload", kw_only=True)
    deadline_seconds: float = field(default=600.0, kw_only=True)
    on_error: OnUploadError = field(default="warn", kw_only=True)
    storage_options: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True, repr=False)
    # Fixed when the option is made: the process may change its directory, and `tiers.json` is read in others.
    _url: str = field(default="", init=False, repr=False, compare=False)

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
            option_keys("storage_options", self.storage_options),
        )
        object.__setattr__(self, "_url", absolute_place(self.to))

    def __repr__(self) -> str:
        # A URL may hold credentials.
        others = (each.name for each in fields(self) if each.repr)
        return f"Upload({self.url!r}, {', '.join(f'{name}={getattr(self, name)!r}' for name in others)})"

    @property
    def url(self) -> str:
        """The place without secrets; a directory by its absolute path."""
        return self._url

    @property
    def bytes_per_second(self) -> int | None:
        """`bandwidth` in bytes per second."""
        return parse_size("bandwidth", self.bandwidth, rate=True)


Uploads: TypeAlias = Upload | Sequence[Upload]
_FIELDS: Final = tuple(each.name for each in fields(Upload) if each.init)


def upload_from(value: Any, where: str = "upload") -> Uploads:
    """Build uploads from plain values: a place, a mapping, or a list of them."""
    if isinstance(value, list | tuple):
        problems = Problems()
        found = [problems.collect(upload_from, each, f"{where}[{index}]") for index, each in enumerate(value)]
        problems.raise_if_any()
        return cast("list[Upload]", found)
    if isinstance(value, Upload):
        return value
    if not isinstance(value, Mapping):
        value = {"to": value}
    value = undotted(value)
    problems = Problems()
    problems.unknown(where, value, _FIELDS)
    if "to" not in value:
        problems.add(f"{where}: 'to' is missing, the directory or URL to upload to")
    values = {name: value[name] for name in _FIELDS if name in value}
    if values.get("keep") is not None:
        values["keep"] = problems.collect(policy_from, values["keep"], "keep", prefix=f"{where}.")
    if "to" in values:
        made = problems.collect(partial(Upload, values.pop("to"), **values), prefix=f"{where}: ")
        problems.raise_if_any()
        return cast("Upload", made)
    problems.raise_if_any()
    raise ConfigError(where)


def problem_of_several(name: str, value: Any, kind: type) -> str | None:
    """Return the problem of an option that is one or several of a kind, or None."""
    each = value if isinstance(value, list | tuple) else () if value is None else (value,)
    wrong = sorted({type(one).__name__ for one in each if not isinstance(one, kind)})
    if wrong:
        known = f"an {kind.__name__} or several"
        return f"{name} must be {known}, not {', '.join(wrong)} (plain values: from_mapping)"
    return None


def absolute_place(to: str | os.PathLike[str] | OpenedPlace) -> str:
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
