"""The options of all ranks, compared once, before anything depends on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, final

from ckpt_core.cadence import OnPreemption
from ckpt_core.coordination import Coordinator
from ckpt_core.errors import ConfigError
from ckpt_core.options import CheckpointOptions, Upload

_UPLOAD: Final = "upload"
_OF_EACH_RANK: Final = {
    # Of the host, its memory, its disk and its way to the service.
    *("arenas", "staging_memory", "write_bandwidth", "headroom", "storage_options"),
    # Used on the coordinator alone; the others may not have the key of a signature.
    *("sign_manifest", "verify_manifest", "job_name", "journal"),
    _UPLOAD,  # see `_uploads`
}
_OF_EACH_RANK_OF_UPLOAD: Final = {"to", "bandwidth", "storage_options"}
_MOST_LISTED: Final = 4
_NONE: Final = "none"


@final
class SameOptions:
    """The check that ranks are given the same options.

    Args:
        coordinator: the ranks.
        options: of this rank.
    """

    def __init__(self, coordinator: Coordinator, options: CheckpointOptions) -> None:
        self._coordinator = coordinator
        self._options = options
        self._compared = 0

    def agree(self) -> None:
        """Refuse options that differ between ranks, at the first call. Collective.

        Raises:
            ConfigError: they differ; it names how, on every rank.
        """
        if self._compared == self._coordinator.world_size:
            return
        terms = {**_terms(self._options, _OF_EACH_RANK), **_uploads(self._options.uploads)}
        self._coordinator.gather_scatter(terms, _decide, what="comparing the options of the ranks")
        self._compared = self._coordinator.world_size


def _decide(given: list[dict[str, str]]) -> list[None]:
    problems = [
        f"rank {rank}: {difference}"
        for rank, own in enumerate(given)
        if (difference := _difference(own, given[0]))
    ]
    if problems:
        more = f"; and {len(problems) - _MOST_LISTED} more ranks" if len(problems) > _MOST_LISTED else ""
        raise ConfigError(
            "every rank must be given the same options, and they differ: "
            f"{'; '.join(problems[:_MOST_LISTED])}{more}. Nothing was written"
        )
    return [None] * len(given)


def _difference(own: Mapping[str, str], first: Mapping[str, str]) -> str:
    """Return how the options of a rank differ from those of rank 0; "" if they do not."""
    names = [name for name in {**first, **own} if own.get(name) != first.get(name)]
    if _UPLOAD in names:
        names = [name for name in names if not name.startswith((f"{_UPLOAD}.", f"{_UPLOAD}["))]
    return ", ".join(
        f"{name} is {own.get(name, _NONE)}, on rank 0 {first.get(name, _NONE)}" for name in names
    )


def _uploads(uploads: Sequence[Upload]) -> dict[str, str]:
    """Return what ranks must have in common of each upload."""
    found = {_UPLOAD: f"to {' and '.join(each.url for each in uploads)}" if uploads else _NONE}
    for number, upload in enumerate(uploads):
        name = f"{_UPLOAD}[{number}]" if len(uploads) > 1 else _UPLOAD
        terms = _terms(upload, _OF_EACH_RANK_OF_UPLOAD)
        found |= {f"{name}.{term}": text for term, text in terms.items()}
    return found


def _terms(options: CheckpointOptions | Upload, left_out: set[str]) -> dict[str, str]:
    names = [each.name for each in fields(options) if each.init and each.name not in left_out]
    return {name: _text(getattr(options, name)) for name in names}


def _text(value: Any) -> str:
    """Return a value as text that is the same in every process: without addresses."""
    kind = type(value)
    if isinstance(value, OnPreemption):
        return f"{kind.__name__}(stop={value.stop})"  # of any rank, by any sign
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if is_dataclass(kind):
        shown = (f"{each.name}={_text(getattr(value, each.name))}" for each in fields(kind))
        return f"{kind.__name__}({', '.join(shown)})"
    # The rest of what options hold is numbers and words, but for classes that a user has made.
    by_name = callable(value) or vars(object)["__repr__"] is kind.__repr__
    return str(getattr(value, "__qualname__", kind.__qualname__)) if by_name else repr(value)
