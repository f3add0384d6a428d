"""The choice of each rank's partner."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Final

HOST_VARIABLE: Final = "CKPT_SUITE_HOST"
"""Environment variable with another name for this rank's host, such as that of a rack."""


def host_name() -> str:
    """Return the name of this rank's host; ranks with one name may fail together."""
    return os.environ.get(HOST_VARIABLE) or platform.node()


def choose_partners(hosts: Sequence[str]) -> list[int]:
    """Return each rank's partner: on another host if there is one, else the next rank.

    Unless one host has more than half of the ranks, every rank is the partner of exactly one.

    Args:
        hosts: the name of every rank's host, by rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    order = [rank for ranks in ranks_of.values() for rank in ranks]
    # So far along the hosts in turn, every host has ended.
    shift = max(map(len, ranks_of.values())) if len(ranks_of) > 1 else 1
    partners = dict.fromkeys(order, 0)
    for place, rank in enumerate(order):
        partner = order[(place + shift) % len(order)]
        if hosts[partner] == hosts[rank] and len(ranks_of) > 1:
            elsewhere = [each for each in order if hosts[each] != hosts[rank]]
            partner = elsewhere[place % len(elsewhere)]
        partners[rank] = partner
    return [partners[rank] for rank in range(len(hosts))]
