"""Comparison of replicas: values of one name on several ranks must be equal.

In the first save of a plan every rank takes a fingerprint of every byte of its replicas; in each later one,
of a few elements of a few tensors, different ones in each save. The fingerprints travel with the rank's
report, and the coordinator compares them before it commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from ckpt_core.dcp import Fingerprints, Part, Replicas, sample
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import OWN_NAMES, DivergenceError
from ckpt_core.messages import message
from ckpt_core.options import OnDivergence

SAMPLED: Final = 16
"""Tensors of each group of ranks that are compared in each save after the first of a plan."""
_WIDTH: Final = 4
_MOST_NAMED: Final = 5

_Groups: TypeAlias = Mapping[str, Sequence[Replicas]]

_logger = logger_of(__name__)


@message
@dataclass(frozen=True, slots=True)
class Findings:
    """One rank's fingerprints, as the coordinator compares them.

    Attributes:
        turn: number of earlier saves of the same plans.
        groups: part -> group of ranks -> fingerprints, in order.
        shared: digests of shared items.
    """

    turn: int
    groups: Mapping[str, Mapping[int, bytes]]
    shared: Mapping[str, int]


@final
class Evidence:
    """Fingerprints of one rank's replicas; live values are read on construction.

    Args:
        turn: number of earlier saves of the same plans; in the first, everything is read.
        shared: digests of the shared items that must be equal on all ranks.
    """

    def __init__(self, parts: Mapping[str, Part], turn: int, shared: Mapping[str, int]) -> None:
        self._turn = turn
        self._shared = shared
        self._found = {
            name: {
                group: Fingerprints(values if turn == 0 else [sample(value, turn) for value in values])
                for group, values in part.replicas(lambda count: chosen(turn, count), whole=turn == 0).items()
            }
            for name, part in parts.items()
        }

    def findings(self, written: Mapping[str, Sequence[int]]) -> Findings:
        """Return what the coordinator compares, small after the first save of a plan.

        Args:
            written: part -> CRC-32 of every slot of this rank's data file.
        """
        groups = {
            part: {group: prints.encode(written[part]) for group, prints in found.items()}
            for part, found in self._found.items()
            if found
        }
        return Findings(self._turn, groups, self._shared)


def chosen(turn: int, count: int) -> Sequence[int]:
    """Choose the replicas, of `count`, to compare in a save."""
    if turn == 0 or count <= SAMPLED:
        return range(count)
    start = (turn - 1) * SAMPLED
    return [(start + at) % count for at in range(SAMPLED)]


@final
class Judge:
    """Comparison of all ranks' fingerprints. Coordinator only, one save at a time."""

    def __init__(self, policy: OnDivergence) -> None:
        self._policy = policy
        self._generation = 0
        self._described = ""

    def judge(self, messages: Sequence[Findings], replicas: _Groups, *, generation: int, step: int) -> None:
        """Compare fingerprints of all ranks; what was found stays true of a generation.

        Raises:
            DivergenceError: ranks hold different values under one name, and that is refused.
        """
        if self._policy == "keep-each":
            return
        if generation != self._generation:
            self._generation, self._described = generation, ""
        differing = dict(_differing(messages, replicas))
        if differing and not self._described:
            self._described = _describe(differing)
            if self._policy == "warn":
                _logger.warning(
                    "step %d: %s; the lowest rank's values are saved. %s", step, self._described, OWN_NAMES
                )
        if self._described and self._policy == "refuse":
            raise DivergenceError(
                f"step {step} was not saved: {self._described}. If they should be equal, the training has "
                "gone wrong: look for values that are not synchronised. "
                f"{OWN_NAMES}. Or choose on_divergence='warn' (the lowest rank's values are saved) or "
                "'keep-each' (every rank's own are)",
                step=step,
                phase="commit",
                differing=differing,
            )


def _differing(messages: Sequence[Findings], replicas: _Groups) -> Iterator[tuple[str, list[int]]]:
    """Yield names with different values, and the ranks that differ from the first."""
    for part, groups in replicas.items():
        for number, group in enumerate(groups):
            found = {rank: messages[rank].groups[part][number] for rank in group.ranks}
            places = chosen(messages[group.ranks[0]].turn, len(group.items))
            yield from _unlike(found, [group.items[place].index.fqn for place in places])
    for name in dict.fromkeys(name for each in messages for name in each.shared):
        having = {rank: each.shared[name] for rank, each in enumerate(messages) if name in each.shared}
        first = next(iter(having.values()))
        if others := [rank for rank, digest in having.items() if digest != first]:
            yield name, others


def _unlike(found: Mapping[int, bytes], names: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    first = next(iter(found.values()))
    others = [
        (rank, each)
        for rank, each in found.items()
        # Fingerprints of different kinds of devices cannot be compared.
        if each != first and each[:_WIDTH] == first[:_WIDTH]
    ]
    if not others:
        return
    for at, name in enumerate(names, start=1):
        place = slice(at * _WIDTH, (at + 1) * _WIDTH)
        ranks = [rank for rank, each in others if each[place] != first[place]]
        if ranks:
            yield name, ranks


def _describe(differing: Mapping[str, Sequence[int]]) -> str:
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in differing.items():
        by_ranks.setdefault(tuple(ranks), []).append(name)
    return "ranks hold different values under the same name: " + "; ".join(
        f"{_ranks(ranks)} in {', '.join(names[:_MOST_NAMED])}"
        + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")
        for ranks, names in list(by_ranks.items())[:_MOST_NAMED]
    )


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_MOST_NAMED])) + (", …" if len(ranks) > _MOST_NAMED else "")
    return f"rank {listed} differs" if len(ranks) == 1 else f"ranks {listed} differ"
