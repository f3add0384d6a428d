"""`Override`: hyperparameters that a resume changes, schedules included."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
from typing import Any, Final, Self, TypeAlias, final

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointNotFoundError, ConfigError
from ckpt_core.validation import mapping, require

_logger = logger_of(__name__)

ANNOTATION: Final = "override"
"""Annotation of every save since hyperparameters were changed: their names and values."""

_Place: TypeAlias = tuple[str, int]
"""Of a parameter group: the name of its optimizer, "" for a single one, and its number."""

_NOT_HYPERPARAMETERS: Final = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
)
_RATE: Final = "lr"
# From what a schedule computes a learning rate: keys of its group, and its own lists.
_OF_GROUP: Final = frozenset({"initial_lr", "max_lr", "min_lr", "swa_lr"})
_OF_SCHEDULER: Final = ("base_lrs", "max_lrs", "_last_lr")


@final
@dataclass(frozen=True, slots=True)
class Override:
    """Hyperparameters that a resume changes: names -> plain values.

    A name is a key of parameter groups, such as `lr`, of all groups that have it; or of some, as a checkpoint
    names them: `param_groups.1.lr`, `optimizer.generator.lr`, `optimizer.0.param_groups.1.lr`. The narrower
    name wins. The schedule of a learning rate continues from the new one: the rates from which it computes
    change in proportion; of a schedule that falls to a given least rate, `eta_min`, the distances from that.
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
            numbers = value if isinstance(value, list) else [value]
            if not isinstance(value, bool) and not all(map(_is_number, numbers)):
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
        """Return itself, if it is for the whole of a state."""
        if self.values and not whole:
            raise ConfigError(
                "override= changes a training that continues with all of its state: leave out items=, "
                "include= and strict=False"
            )
        return self

    def require_origin(self, url: str) -> None:
        """Refuse to change what does not exist yet.

        A first run would begin without the change, and make it after an interruption.
        """
        if self.values:
            raise CheckpointNotFoundError(
                f"override= changes a training midway, and nothing has been committed to {url} yet: check "
                "the path, or begin with these values in the script and without override="
            )

    def check(self, optimizers: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Refuse names that no group has, and values of another kind.

        The parameter groups are by the name of their optimizer, "" of a single one.

        Raises:
            ConfigError: there is one; nothing was changed.
        """
        named = _named(optimizers)
        for name, value in self.values.items():
            if name not in named:
                raise ConfigError(f"override: no optimizer has {name}; {_there_are(name, named)}")
            for (optimizer, number), option in named[name]:
                if problem := _problem(name, optimizers[optimizer][number], option, value):
                    raise ConfigError(f"override: {problem}")

    def apply(self, optimizers: Mapping[str, torch.optim.Optimizer], schedulers: Iterable[Any]) -> None:
        """Change live groups, and the schedules of those whose learning rate changes."""
        outer = [_unwrapped(each, "scheduler") for each in schedulers]
        groups = {name: each.param_groups for name, each in optimizers.items()}
        new: dict[_Place, dict[str, Any]] = {}
        for name, meant in _named(groups).items():
            for place, option in meant if name in self.values else ():
                new.setdefault(place, {})[option] = self.values[name]
        before, changed = _next_groups(outer, optimizers), list[tuple[_Place, str]]()
        for place, options in new.items():
            optimizer, group = optimizers[place[0]], groups[place[0]][place[1]]
            changed += [(place, each) for each, value in options.items() if not _equal(group[each], value)]
            if _RATE in options:
                _rescale(outer, optimizer, place[1], float(options[_RATE]))
            group.update({each: _filled(group[each], value) for each, value in options.items()})
        after = _next_groups(outer, optimizers)
        for place, option in changed:
            if place not in after or _equal(coming := after[place][option], new[place][option]):
                continue
            if option != _RATE or _equal(coming, before[place][option]):  # else it goes on from the new one
                _logger.warning(
                    "override: a scheduler sets %s of parameter group %d to %s at its next step, whatever "
                    "was given: change it where the scheduler is made",
                    option, place[1], _text(coming),
                )  # fmt: skip


def _filled(live: Any, value: Any) -> Any:
    if isinstance(live, torch.Tensor):
        return live.fill_(value)
    return tuple(value) if isinstance(live, tuple) else value


def _named(optimizers: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[tuple[_Place, str]]]:
    """Map each name to the options of groups that it means, the narrower names last."""
    named: dict[str, list[tuple[_Place, str]]] = {}
    for of_optimizer, of_group in product((False, True), repeat=2):
        for name, groups in optimizers.items():
            heads = ("optimizer.", "") if not of_optimizer else (f"optimizer.{name}.",) if name else ()
            for head, (number, group) in product(heads, enumerate(groups)):
                middle = f"param_groups.{number}." if of_group else ""
                for option in group.keys() - _NOT_HYPERPARAMETERS:
                    named.setdefault(head + middle + option, []).append(((name, number), option))
    return named


def _there_are(name: str, named: Collection[str]) -> str:
    options = sorted(each for each in named if "." not in each)
    if not options:
        return "the state has no optimizer"
    near = get_close_matches(name.rpartition(".")[2], options, n=1)
    meant = f" (did you mean {near[0]}?)" if near and near[0] not in name else ""
    of_groups = [each for each in named if each.endswith("." + _RATE) and "param_groups." in each]
    of_some = f", each also of some groups, as {of_groups[-1]}" if len(of_groups) > 2 else ""
    return f"there are {', '.join(options)}{of_some}{meant}"


def _plain(value: Any) -> Any:
    """Convert tensors and text to numbers, tuples to lists; 1e-4 is a text in YAML."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _problem(name: str, group: Mapping[str, Any], option: str, value: Any) -> str | None:
    """Return why a value cannot replace the one of a group, or None."""
    live, numbers = group[option], value if isinstance(value, list) else [value]
    if isinstance(live, tuple | list):
        fits = isinstance(value, list) and len(value) == len(live)
    elif isinstance(live, bool) or isinstance(value, bool):
        fits = isinstance(live, bool) and isinstance(value, bool)
    else:
        is_one = not isinstance(live, torch.Tensor) or live.numel() == 1
        fits = is_one and not isinstance(live, str) and not isinstance(value, list)
    if not fits:
        return f"{name} is {live!r}, which {value!r} cannot replace"
    if min(numbers) < 0 or (option == "betas" and max(numbers) >= 1):  # as torch's optimizers refuse them
        return f"{value!r} is out of range for {name}"
    # RMSprop, which can be centered, makes the buffer of a momentum at its first step only.
    makes_state = option in {"amsgrad", "centered"} or (option == "momentum" and "centered" in group)
    if makes_state and value and not live:
        return f"{name}={value!r} needs a state that this optimizer, made with {live!r}, does not have"
    return None


def _rescale(outer: Iterable[Any], optimizer: torch.optim.Optimizer, number: int, rate: float) -> None:
    """Change what the schedules of one parameter group compute its rate from."""
    group = optimizer.param_groups[number]
    before = float(group[_RATE])

    def scaled(value: Any, least: float = 0.0) -> Any:
        new = rate
        if before != least:
            new = least + (float(value) - least) * ((rate - least) / (before - least))
        return torch.full_like(value, new) if isinstance(value, torch.Tensor) else new

    group.update({name: scaled(group[name]) for name in group.keys() & _OF_GROUP})
    for scheduler in (part for each in outer for part in _with_parts(each)):
        if _innermost(getattr(scheduler, "optimizer", None)) is not optimizer:
            continue
        # The rate to which the schedule falls, if the present rate is on it.
        least, last = getattr(scheduler, "eta_min", 0), getattr(scheduler, "_last_lr", [])
        falls = isinstance(least, int | float) and number < len(last) and float(last[number]) == before
        for name in _OF_SCHEDULER:
            rates = getattr(scheduler, name, None)
            if isinstance(rates, list) and number < len(rates):
                rates[number] = scaled(rates[number], float(least) if falls else 0.0)


def _next_groups(
    outer: Iterable[Any], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[_Place, Mapping[str, Any]]:
    """Return the groups after the next step of their schedulers, which copies make.

    A schedule that cannot be copied, or waits for a metric, is left out.
    """
    found: dict[_Place, Mapping[str, Any]] = {}
    for name, optimizer in optimizers.items():
        # A stand-in that has the groups, for schedulers only.
        double = object.__new__(type(optimizer))
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        double.__dict__.update(optimizer.__dict__, param_groups=copy.deepcopy(groups), state={})
        for scheduler in outer:
            holders = [each.optimizer for each in _with_parts(scheduler) if hasattr(each, "optimizer")]
            waits = isinstance(scheduler, ReduceLROnPlateau)
            if waits or not any(_innermost(each) is optimizer for each in holders):
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    copy.deepcopy(scheduler, {id(each): double for each in [optimizer, *holders]}).step()
            except Exception:  # noqa: BLE001, S112 - code of a user's own scheduler: then nothing is foretold
                continue
            found |= {(name, number): group for number, group in enumerate(double.param_groups)}
    return found


def _with_parts(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler, and those that it is made of."""
    yield scheduler
    for each in getattr(scheduler, "_schedulers", ()):
        yield from _with_parts(each)


def _unwrapped(wrapper: Any, name: str, kind: type = object) -> Any:
    """Return what a host's wrappers hold under an attribute."""
    while isinstance(inner := getattr(wrapper, name, None), kind) and inner is not None:
        wrapper = inner
    return wrapper


def _innermost(optimizer: Any) -> Any:
    return _unwrapped(optimizer, "optimizer", torch.optim.Optimizer)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list):
        return all(map(_equal, one, other))
    return one is not None and math.isclose(float(one), float(other), rel_tol=1e-9)


def _text(value: Any) -> str:
    return ", ".join(map(_text, value)) if isinstance(value, tuple | list) else f"{float(value):.6g}"
