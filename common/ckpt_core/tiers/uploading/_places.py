"""Uploads are refused where two tiers are one place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from ckpt_core.disclosure import public_url
from ckpt_core.errors import ConfigError
from ckpt_core.options import CheckpointOptions
from ckpt_core.storage import LocalStorage, ObjectStorage, Storage

_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az"}


def refuse_one_place(tiers: Sequence[Storage], options: CheckpointOptions) -> None:
    """Refuse tiers of which one is in another.

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
