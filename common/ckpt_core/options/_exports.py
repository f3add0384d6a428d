"""The option `export`: weights in a format of others, written behind the training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, Literal, TypeAlias, cast, final

from ckpt_core.options._parsing import Problems, option_keys, undotted
from ckpt_core.options._uploads import absolute_place
from ckpt_core.validation import integer, location, one_of, positive, require, text

ExportWhen: TypeAlias = Literal["best", "final"] | Mapping[str, int]


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
        object.__setattr__(self, "url", absolute_place(self.place))

    @property
    def every(self) -> int | None:
        """`n` of `{"every": n}`; else None."""
        return None if isinstance(self.when, str) else self.when["every"]


Exports: TypeAlias = Export | Sequence[Export]
_FIELDS: Final = tuple(each.name for each in fields(Export) if each.init)


def export_from(value: Any, where: str = "export") -> Exports:
    """Build exports from plain values: a mapping, or a list of them."""
    problems = Problems()
    if isinstance(value, list | tuple):
        found = [problems.collect(export_from, each, f"{where}[{index}]") for index, each in enumerate(value)]
        problems.raise_if_any()
        return cast("list[Export]", found)
    if isinstance(value, Export):
        return value
    if not isinstance(value, Mapping):
        problems.add(f'{where} must be a mapping such as {{to: hf, place: "s3://bucket/weights"}}')
        value = {}
    value = undotted(value)
    problems.unknown(where, value, _FIELDS)
    missing = [name for name in ("to", "place") if name not in value]
    if missing:
        problems.add(f"{where}: {' and '.join(missing)} must be given: the format, and where it is written")
    problems.raise_if_any()
    made = problems.collect(partial(Export, **value), prefix=f"{where}: ")
    problems.raise_if_any()
    return cast("Export", made)


def _when_problem(value: Any) -> str | None:
    if isinstance(value, Mapping) and list(value) == ["every"]:
        return integer("when: every", value["every"], minimum=1)
    if value in ("best", "final"):
        return None
    return f'when must be "best", "final" or {{"every": n}}, not {value!r}'
