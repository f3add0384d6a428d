"""`Override`: hyperparameters to change, by their names in a checkpoint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final, Self, final

import torch

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointNotFoundError, ConfigError
from ckpt_core.state.overriding._schedules import Schedules
from ckpt_core.validation import mapping, require

_logger = logger_of(__name__)

ANNOTATION: Final = "override"
"""Annotation of every save since hyperparameters were changed: their names and values."""

_NAME: Final = re.compile(
    r"(?:optimizer(?:\.(?P<optimizer>(?!param_groups\.).+?))?\.)?"
    r"(?:param_groups\.(?P<group>\d+)\.)?(?P<option>[^.]+)"
)
_NOT_HYPERPARAMETERS: Final = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
)
_MAKE_STATE: Final = frozenset({"amsgrad", "centered"})
"""Switches of torch's optimizers that need a state which an optimizer made without them does not have."""
_RATE: Final = "lr"


@final
@dataclass(frozen=True, slots=True)
class Override:
    """Hyperparameters that a resume changes.

    A name is a key of parameter groups, such as `lr`, of all groups that have it; or of some, as a checkpoint
    names them: `param_groups.1.lr`, `optimizer.generator.lr`, `optimizer.0.param_groups.1.lr`. The narrower
    name wins. A learning rate takes its schedule along: see `Schedules`.

    Attributes:
        values: name -> plain value.
    """

    values: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, given: Any) -> Self:
        """Make an override of a user's mapping, or of None for no change.

        Raises:
            ConfigError: it is no mapping of names to numbers, switches or lists of numbers.
        """
        given = {} if given is None else given
        require("override", mapping("override", given))
        values = {str(name): _plain(value) for name, value in given.items()}
        for name, value in values.items():
            if not _is_storable(value):
                raise ConfigError(
                    f"override: {name} must be a finite number, true or false, or a list of numbers, "
                    f"not {value!r:.80}"
                )
        return cls(values)

    @classmethod
    def parsed(cls, texts: Iterable[str]) -> Self:
        """Make an override of words like `lr=1e-4`, as on a command line.

        Raises:
            ConfigError: a word is none, or a name is given twice.
        """
        values: dict[str, Any] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or not name or name in values:
                why = f"{name} is given twice" if equals and name else "write it as lr=1e-4"
                raise ConfigError(f"--override {text}: {why}")
            try:
                values[name] = json.loads(value)
            except ValueError:
                values[name] = value
        return cls.of(values)

    @classmethod
    def in_force(cls, annotations: Mapping[str, Any]) -> Self:
        """Return what was changed in the run of a checkpoint with these annotations."""
        recorded = annotations.get(ANNOTATION)
        return cls(recorded) if isinstance(recorded, Mapping) else cls()

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def items(self) -> list[list[Any]]:
        """Names and values in order, for ranks to compare."""
        return [[name, self.values[name]] for name in sorted(self.values)]

    @property
    def annotations(self) -> dict[str, Any]:
        """The annotations of a save with these values in force."""
        return {ANNOTATION: dict(self.values)} if self.values else {}

    def differs_from(self, annotations: Mapping[str, Any]) -> bool:
        """Return whether there is something to change in a checkpoint.

        Its annotations tell: a script that is restarted gives the same values again, which are in force, or a
        schedule has gone on from them.
        """
        return bool(self.values) and annotations.get(ANNOTATION) != self.values

    def of_whole(self, *, whole: bool) -> Self:
        """Return itself, if it is for the whole of a state.

        Raises:
            ConfigError: it is not.
        """
        if self.values and not whole:
            raise ConfigError(
                "override= changes a training that continues with all of its state: leave out items=, "
                "include= and strict=False"
            )
        return self

    def require_origin(self, url: str) -> None:
        """Refuse to change what does not exist yet.

        A first run would begin without the change, and make it after an interruption.

        Raises:
            CheckpointNotFoundError: there is something to change.
        """
        if self.values:
            raise CheckpointNotFoundError(
                f"override= changes a training midway, and nothing has been committed to {url} yet: check "
                "the path, or begin with these values in the script and without override="
            )

    def check(self, optimizers: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Refuse names that no group has, and values of another kind.

        Args:
            optimizers: name -> parameter groups, with their values; the name of a single one is "".

        Raises:
            ConfigError: there is one; nothing was changed.
        """
        for name, value in self.values.items():
            found = list(_found(name, optimizers))
            if not found:
                raise ConfigError(f"override: no optimizer has {name}; {_there_are(name, optimizers)}")
            for _, group, option in found:
                if not _is_like(group[option], value):
                    raise ConfigError(
                        f"override: {name} is {group[option]!r}, which {value!r} cannot replace"
                    )
                if not _is_in_range(option, value):
                    raise ConfigError(f"override: {value!r} is out of range for {name}")
                if _needs_state(option, group, value):
                    raise ConfigError(
                        f"override: {name}={value!r} needs a state that this optimizer, made with "
                        f"{group[option]!r}, does not have"
                    )

    def apply(self, optimizers: Mapping[str, torch.optim.Optimizer], schedulers: Iterable[Any]) -> None:
        """Change live groups, and the schedules of those whose learning rate changes."""
        schedules = Schedules(schedulers)
        groups = {name: each.param_groups for name, each in optimizers.items()}
        new: dict[tuple[str, int, str], Any] = {}
        # The narrower a name, the longer the places that it gives.
        for name in sorted(self.values, key=_narrowness):
            for (optimizer, number), _, option in _found(name, groups):
                new[optimizer, number, option] = self.values[name]
        before = schedules.next_values(optimizers.values())
        changed: list[tuple[str, int, str]] = []
        for (name, number, option), value in new.items():
            if not _equal(groups[name][number][option], value):
                changed.append((name, number, option))
            if option == _RATE:
                given = {each for of, at, each in new if (of, at) == (name, number)}
                schedules.rescale(optimizers[name], number, float(value), keep=given)
            set_option(groups[name][number], option, value)
        after = schedules.next_values(optimizers.values())
        for name, number, option in changed:
            place = id(optimizers[name]), number
            if place in after and _is_undone(option, groups[name][number], before[place], after[place]):
                _logger.warning(
                    "override: a scheduler sets %s of parameter group %d to %s at its next step, whatever "
                    "was given: change it where the scheduler is made",
                    option, number, _text(after[place][option]),
                )  # fmt: skip


def set_option(group: dict[str, Any], option: str, value: Any) -> None:
    """Set a hyperparameter; tensors stay tensors, tuples stay tuples."""
    live = group[option]
    if isinstance(live, torch.Tensor):
        live.fill_(value)
    else:
        group[option] = tuple(value) if isinstance(live, tuple) else value


def _found(
    name: str, optimizers: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[tuple[tuple[str, int], Mapping[str, Any], str]]:
    """Yield place, group and option of everything that `name` means."""
    match = _NAME.fullmatch(name)
    if match is None or match["option"] in _NOT_HYPERPARAMETERS:
        return
    for optimizer, groups in optimizers.items():
        if match["optimizer"] not in {None, optimizer}:
            continue
        for number, group in enumerate(groups):
            if match["group"] in {None, str(number)} and match["option"] in group:
                yield (optimizer, number), group, match["option"]


def _narrowness(name: str) -> tuple[bool, bool]:
    match = _NAME.fullmatch(name)
    return (False, False) if match is None else (match["optimizer"] is not None, match["group"] is not None)


def _there_are(name: str, optimizers: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    options = {option for groups in optimizers.values() for group in groups for option in group}
    options -= _NOT_HYPERPARAMETERS
    if not options:
        return "the state has no optimizer"
    near = get_close_matches(name.rpartition(".")[2], options, n=1)
    meant = f" (did you mean {near[0]}?)" if near and near[0] not in name else ""
    places = [
        f"{f'optimizer.{each}.' if each else ''}param_groups.{number}."
        for each, groups in optimizers.items()
        for number in range(len(groups))
    ]
    of_some = f", each also of some groups, as {places[-1]}lr" if len(places) > 1 else ""
    return f"there are {', '.join(sorted(options))}{of_some}{meant}"


def _plain(value: Any) -> Any:
    """Convert tensors and text to numbers, tuples to lists; 1e-4 is a text in YAML."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _is_storable(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_number, value))
    return isinstance(value, bool) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_like(live: Any, value: Any) -> bool:
    if isinstance(live, bool) or isinstance(value, bool):
        return isinstance(live, bool) and isinstance(value, bool)
    if isinstance(live, tuple | list):
        return isinstance(value, list) and len(value) == len(live)
    if isinstance(live, str) or isinstance(value, list):
        return False
    return not isinstance(live, torch.Tensor) or live.numel() == 1


def _is_in_range(option: str, value: Any) -> bool:
    """Return whether torch's optimizers could be made with a value."""
    values = value if isinstance(value, list) else [value]
    return all(each >= 0 for each in values) and (option != "betas" or all(each < 1 for each in values))


def _needs_state(option: str, group: Mapping[str, Any], value: Any) -> bool:
    if option == "momentum" and "centered" in group:  # RMSprop makes its buffer at its first step only
        return bool(value) and not group[option]
    return option in _MAKE_STATE and bool(value) and not group[option]


def _is_undone(
    option: str, group: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> bool:
    """Return whether the next step of a schedule takes no notice of a new value."""
    if option != _RATE:
        return not _equal(after[option], group[option])
    return _equal(after[option], before[option]) and not _equal(after[option], group[option])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list):
        return all(map(_equal, one, other))
    return one is not None and math.isclose(float(one), float(other), rel_tol=1e-9)


def _text(value: Any) -> str:
    return ", ".join(map(_text, value)) if isinstance(value, tuple | list) else f"{float(value):.6g}"
