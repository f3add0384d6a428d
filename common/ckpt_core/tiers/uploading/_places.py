"""Uploads are refused where two tiers are one place, or ranks differ."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from typing import Any, Final

from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import public_url
from ckpt_core.errors import ConfigError
from ckpt_core.options import CheckpointOptions, Upload
from ckpt_core.storage import LocalStorage, ObjectStorage, Storage

_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az"}
_OF_EACH_RANK: Final = {"to", "bandwidth", "storage_options"}
"""Options of an upload that ranks may have of their own; of `to` the place must be the same."""
_MOST_LISTED: Final = 4


def same_uploads(coordinator: Coordinator, uploads: Sequence[Upload]) -> None:
    """Refuse uploads that are not the same on every rank. Collective.

    Raises:
        ConfigError: they are not; it names the difference, on every rank.
    """

    def decide(given: list[list[dict[str, str]]]) -> list[None]:
        problems = [
            f"rank {rank}: {problem}"
            for rank, each in enumerate(given)
            if (problem := _difference(each, given[0]))
        ]
        if problems:
            more = f"; and {len(problems) - _MOST_LISTED} more ranks" if len(problems) > _MOST_LISTED else ""
            raise ConfigError(
                f"every rank must be given the same upload=, and they differ: "
                f"{'; '.join(problems[:_MOST_LISTED])}{more}. Nothing was written"
            )
        return [None] * len(given)

    own = [_terms(upload) for upload in uploads]
    coordinator.gather_scatter(own, decide, what="comparing the option upload")


def _terms(upload: Upload) -> dict[str, str]:
    own = {each.name for each in fields(upload) if each.init} - _OF_EACH_RANK
    return {"to": upload.url, **{name: repr(getattr(upload, name)) for name in sorted(own)}}


def _difference(given: Sequence[Mapping[str, str]], first: Sequence[Mapping[str, str]]) -> str:
    """Return how the uploads of a rank differ from those of rank 0; "" if they do not."""
    if len(given) != len(first):
        return f"{_places(given)}, and rank 0: {_places(first)}"
    for number, (own, other) in enumerate(zip(given, first, strict=True)):
        for name in own:
            if own[name] != other.get(name):
                index = f"[{number}]" if len(given) > 1 else ""
                return f"upload{index}.{name} is {own[name]}, on rank 0 {other.get(name)}"
    return ""


def _places(given: Sequence[Mapping[str, str]]) -> str:
    return f"uploads to {' and '.join(each['to'] for each in given)}" if given else "no upload"


def refuse_one_place(tiers: Sequence[Storage], options: CheckpointOptions) -> None:
    """Refuse tiers of which one is in another.

    Args:
        tiers: of the run, its root first.
        options: of the manager.

    Raises:
        ConfigError: there are such.
    """
    given = [options.storage_options, *(upload.storage_options for upload in options.uploads)]
    places = list(zip((tier.own for tier in tiers), given, strict=True))
    for (one, its_options), (other, others_options) in combinations(places, 2):
        if _is_one_place(one, its_options, other, others_options):
            raise ConfigError(
                f"upload: {public_url(other.url)} and {public_url(one.url)} are the same place, or one is in "
                "the other; a further tier needs a place of its own"
            )


def _is_one_place(
    one: Storage, its_options: Mapping[str, Any], other: Storage, others_options: Mapping[str, Any]
) -> bool:
    if one is other:
        return True
    if isinstance(one, LocalStorage) and isinstance(other, LocalStorage):
        return _nested(_parts(os.path.realpath(one.url)), _parts(os.path.realpath(other.url)))
    if isinstance(one, ObjectStorage) and isinstance(other, ObjectStorage):
        same_service = _endpoint(its_options) == _endpoint(others_options)
        return same_service and _nested(_parts(_plain(one.url)), _parts(_plain(other.url)))
    return False


def _nested(one: Sequence[str], other: Sequence[str]) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _parts(place: str) -> Sequence[str]:
    return place.rstrip("/").split("/")


def _plain(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{_ALIASES.get(scheme, scheme)}{separator}{rest}"


def _endpoint(options: Mapping[str, Any]) -> object:
    client = options.get("client_kwargs")
    inner = client.get("endpoint_url") if isinstance(client, Mapping) else None
    return options.get("endpoint_url") or options.get("endpoint") or inner
