"""Who hands a message on to whom: a binomial tree over the ranks of a relay."""

from __future__ import annotations

from collections.abc import Sequence


def neighbours(ranks: Sequence[int], rank: int) -> tuple[int | None, list[int]]:
    """From whom `rank` gets what starts at `ranks[0]`, None at the start, and to whom it hands it on.

    The longest way is log2 of the number of ranks.

    Raises:
        ValueError: `rank` is not among `ranks`, or one of them is there twice.
    """
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"ranks {list(ranks)} are not all different")
    place, count = list(ranks).index(rank), len(ranks)
    reach = 1
    while reach < count and not place & reach:
        reach *= 2
    parent = ranks[place - reach] if place else None
    children: list[int] = []
    while reach > 1:
        reach //= 2
        if place + reach < count:
            children.append(ranks[place + reach])
    return parent, children
