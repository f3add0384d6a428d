"""Walks over nested state dicts, with the same leaves and paths as DCP's planners.

DCP descends into mappings, and into lists only if an element is a tensor or a container; every other value, a
tuple included, is one leaf. Mapping keys become strings; empty mappings are not recorded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise, zip_longest
from typing import Any, TypeAlias

import torch

from ckpt_core.types import SavedEntries

Path: TypeAlias = tuple[str | int, ...]


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf below `tree` with its path, in order."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, str(key)))
    elif is_leaf(tree):
        yield path, tree
    else:
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))


def is_leaf(value: Any) -> bool:
    """Return whether DCP stores `value` as a whole."""
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(isinstance(each, torch.Tensor) or not is_leaf(each) for each in value)


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Set the leaf at `path`, creating dicts and lists on the way."""
    here: Any = tree
    for key, following in pairwise((*path, None)):
        is_list = isinstance(here, list)
        if is_list:
            here.extend([None] * (int(key or 0) + 1 - len(here)))
        if following is None:
            here[key] = value
            return
        inner = here[key] if is_list else here.get(key)
        if inner is None:
            inner = here[key] = [] if isinstance(following, int) else {}
        here = inner


def get(tree: Any, path: Path) -> Any:
    """Return the value at `path`, or None if the path does not exist."""
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, list) and isinstance(key, int):
            tree = next(iter(tree[key : key + 1]), None)
        else:
            return None
    return tree


def rekeyed(loaded: Any, like: Any) -> Any:
    """Restore keys that are no strings, and dict types, from `like`."""
    if isinstance(loaded, dict) and isinstance(like, Mapping):
        keys = {str(key): key for key in like}
        return _in_kind_of(
            like,
            {
                keys.get(key, key): rekeyed(value, like.get(keys.get(key, key)))
                for key, value in loaded.items()
            },
        )
    if isinstance(loaded, list) and isinstance(like, list):
        return [rekeyed(*pair) for pair in zip_longest(loaded, like[: len(loaded)])]
    return loaded


def _in_kind_of(like: Mapping[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    if type(like) is defaultdict:
        return defaultdict(like.default_factory, values)
    if type(like) is OrderedDict:
        return OrderedDict(values)
    return Counter(values) if type(like) is Counter else values


def with_empties(loaded: Any, like: Any) -> Any:
    """Add the mappings of `like` that `loaded` lacks: they were empty when saved."""
    if isinstance(loaded, dict) and isinstance(like, Mapping):
        for key, value in like.items():
            if key in loaded:
                loaded[key] = with_empties(loaded[key], value)
            elif isinstance(value, Mapping):
                loaded[key] = with_empties(_in_kind_of(value, {}), value)
    return loaded


def under(entries: SavedEntries, *prefix: str | int) -> SavedEntries:
    """Return the entries below `prefix`, with paths relative to it."""
    depth = len(prefix)
    return {path[depth:]: value for path, value in entries.items() if path[:depth] == prefix and path[depth:]}
