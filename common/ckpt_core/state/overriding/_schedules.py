"""Schedules of learning rates, when a rate is changed midway."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, final

import torch

from ckpt_core.disclosure import logger_of

_logger = logger_of(__name__)

_OF_GROUP: Final = ("initial_lr", "max_lr", "min_lr", "swa_lr")
_OF_SCHEDULER: Final = ("base_lrs", "max_lrs", "_last_lr")


@final
class Schedules:
    """The schedulers of a training, those that they are made of included.

    A schedule continues from a new rate: the rates from which it computes change in proportion. Of a schedule
    that falls to a given least rate, `eta_min`, the distances from that do.
    """

    def __init__(self, schedulers: Iterable[Any]) -> None:
        self._outer = [_unwrapped(each) for each in schedulers]
        self._all = [inner for each in self._outer for inner in _with_parts(each)]

    def rescale(
        self, optimizer: torch.optim.Optimizer, number: int, rate: float, *, keep: Collection[str]
    ) -> None:
        """Change what the schedules of one parameter group compute its rate from.

        Args:
            optimizer: of the group, whose rate is still the present one.
            number: of the group.
            rate: the new one.
            keep: keys of the group that are given new values themselves.
        """
        group = optimizer.param_groups[number]
        before = float(group["lr"])
        for name in group.keys() & set(_OF_GROUP) - set(keep):
            group[name] = _like(group[name], _scaled(group[name], before, rate))
        for scheduler in self._all:
            if _optimizer_of(scheduler) is optimizer:
                least = _least(scheduler, number, before)
                for name in _OF_SCHEDULER:
                    rates = getattr(scheduler, name, None)
                    if isinstance(rates, list) and number < len(rates):
                        new = _scaled(rates[number], before, rate, least)
                        if name == "base_lrs":
                            _logger.info(
                                "override: the %s of parameter group %d computes from %.6g, not %.6g",
                                type(scheduler).__name__, number, new, float(rates[number]),
                            )  # fmt: skip
                        rates[number] = _like(rates[number], new)

    def next_values(
        self, optimizers: Iterable[torch.optim.Optimizer]
    ) -> Mapping[tuple[int, int], Mapping[str, Any]]:
        """Return what parameter groups will hold after the next step of their schedulers.

        Copies make that step. A schedule that cannot be copied, or waits for a metric, is left out.

        Returns:
            (id of an optimizer, number of a group) -> the group, without its parameters.
        """
        found: dict[tuple[int, int], Mapping[str, Any]] = {}
        copies = {id(each): _without_parameters(each) for each in optimizers}
        wrapped = {
            id(each.optimizer): copies.get(id(_optimizer_of(each)))
            for each in self._all
            if hasattr(each, "optimizer")
        }
        known = copies | {key: each for key, each in wrapped.items() if each is not None}
        for scheduler in self._outer:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    copy.deepcopy(scheduler, dict(known)).step()
            except Exception:  # noqa: BLE001, S112 - code of a user's own scheduler: then nothing is foretold
                continue
            optimizer = copies.get(id(_optimizer_of(scheduler)))
            if optimizer is not None:
                origin = id(_optimizer_of(scheduler))
                found |= {(origin, number): group for number, group in enumerate(optimizer.param_groups)}
        return found


def _unwrapped(scheduler: Any) -> Any:
    inner = getattr(scheduler, "scheduler", None)
    return scheduler if inner is None else _unwrapped(inner)


def _with_parts(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler, and those that it is made of."""
    yield scheduler
    for each in getattr(scheduler, "_schedulers", ()):
        yield from _with_parts(each)


def _optimizer_of(scheduler: Any) -> Any:
    """Return the torch optimizer of a scheduler, without a host's wrappers."""
    optimizer = getattr(scheduler, "optimizer", None)
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _least(scheduler: Any, number: int, before: float) -> float:
    """Return the rate to which a schedule falls, if the present rate is on it; else 0."""
    least, last = getattr(scheduler, "eta_min", 0), getattr(scheduler, "_last_lr", [])
    on_it = number < len(last) and float(last[number]) == before
    return float(least) if on_it and isinstance(least, int | float) else 0.0


def _scaled(value: Any, before: float, rate: float, least: float = 0.0) -> float:
    if before == least:
        return rate
    return least + (float(value) - least) * ((rate - least) / (before - least))


def _like(live: Any, value: float) -> Any:
    return torch.full_like(live, value) if isinstance(live, torch.Tensor) else value


def _without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a stand-in that has the groups of an optimizer, for schedulers only."""
    double = object.__new__(type(optimizer))
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    double.__dict__.update(optimizer.__dict__, param_groups=copy.deepcopy(groups), state={})
    return double
