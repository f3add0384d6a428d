"""Parsing of options: files, collected problems, amounts, plain policies.

Errors name positions in files, never the content, which may be a password.
"""

from __future__ import annotations

import math
import operator
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import reduce
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, cast, final, overload

from ckpt_core import cadence, retention
from ckpt_core.errors import ConfigError
from ckpt_core.policies import RetentionPolicy, SavePolicy, is_of_kind
from ckpt_core.validation import boolean, bytes_in, one_of, require
from ckpt_core.vocabulary import instead_of_option, similar


@final
class Problems:
    """A collector of problems, for one reader."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, problem: str) -> None:
        self._found.append(problem)

    def collect(self, build: Callable[..., Any], *arguments: Any, prefix: str = "") -> Any:
        """Call `build(*arguments)`; on ConfigError record it and return None."""
        try:
            return build(*arguments)
        except ConfigError as error:
            self.add(f"{prefix}{error}")
            return None

    def unknown(
        self, where: str, keys: Iterable[Any], allowed: Collection[str], *, options: bool = False
    ) -> None:
        """Record every key that is not allowed, with what is meant by it."""
        wrong = {key: keys[key] if isinstance(keys, Mapping) else None for key in keys if key not in allowed}
        if wrong:
            advise = instead_of_option if options else similar
            named = ", ".join(f"{key!r}{advise(str(key), allowed, wrong[key])}" for key in wrong)
            self.add(f"{where}: unknown {named}; allowed are {', '.join(sorted(allowed))}")

    def raise_if_any(self, separator: str = "\n") -> None:
        if self._found:
            raise ConfigError(separator.join(self._found))


_SHARE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*%\s*")


def undotted(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Nest keys such as `optimal.mtbf`, which LightningCLI makes of arguments."""
    found: dict[Any, Any] = {}
    for key, value in mapping.items():
        head, _, rest = key.partition(".") if isinstance(key, str) else (key, "", "")
        inner = found.get(head, {})
        if head and rest and isinstance(inner, Mapping):
            found[head] = undotted({**inner, rest: value})
        else:
            found[key] = value
    return found


def bytes_text(size: float) -> str:
    """Format a size for messages: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """The space that saves leave free: the smaller limit; None for no such one."""

    most_bytes: int | None = None
    share: float | None = None

    def of(self, total_bytes: int | None) -> int:
        """Return the smaller limit in bytes; 0 if it depends on an unknown size."""
        bounds = [] if self.most_bytes is None else [self.most_bytes]
        if self.share is not None:
            bounds.append(int(self.share * (total_bytes or 0)))
        return min(bounds, default=0)


DEFAULT_HEADROOM: Final = Headroom(most_bytes=1 << 30, share=0.01)


def parse_headroom(value: Any) -> Headroom:
    """Parse bytes, "2 GiB" or "5 %"; None is the default, 1 % and at most 1 GiB."""
    if value is None:
        return DEFAULT_HEADROOM
    share = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if share is not None and float(share[1]) < 100:
        return Headroom(share=float(share[1]) / 100)
    size = None if share is not None else bytes_in(value)
    if size is None or not math.isfinite(size) or size < 0:
        raise ConfigError(
            f'headroom must be a number of bytes, 0 or more, or text like "2 GiB" or "5 %", not {value!r}'
        )
    return Headroom(most_bytes=int(size))


def refused(parse: Callable[..., Any], *arguments: Any, **options: Any) -> str | None:
    try:
        parse(*arguments, **options)
    except ConfigError as error:
        return str(error)
    return None


def policy_problem(name: str, value: Any, kind: type[SavePolicy] | type[RetentionPolicy]) -> str | None:
    if value is None or is_of_kind(value, kind):
        return None
    return f"{name} must be a {kind.__name__}, not {value!r} (plain values go through from_mapping)"


def option_keys(name: str, value: Any) -> str | None:
    # It may hold passwords: errors show only its names.
    if not isinstance(value, Mapping):
        return f"{name} must be a mapping with string keys, not {type(value).__name__}"
    wrong = sorted({type(key).__name__ for key in value if not isinstance(key, str)})
    return f"{name} must have string keys, not of type {', '.join(wrong)}" if wrong else None


def parse_yaml(text: str, where: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"{where}: YAML needs PyYAML: `pip install pyyaml`, or write TOML or JSON"
        ) from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(
            f"{where}: cannot read the options: not YAML{place} ({type(error).__name__})"
        ) from None


def read_document(path: Path) -> Mapping[str, Any]:
    """Read the mapping in a `.toml`, `.yaml` or `.yml` file; empty for an empty file."""
    if path.suffix not in _PARSERS:
        raise ConfigError(f"{path}: options are read from {', '.join(_PARSERS)} files only")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the options: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 at byte {error.start}") from None
    document = _PARSERS[path.suffix](text, str(path))
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path}: expected a mapping at the top, not {type(document).__name__}")
    return document


def _parse_toml(text: str, where: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Only the position of its message: the rest may quote the content.
        _, found, place = str(error).rpartition("(at ")
        position = f" at {place.rstrip(')')}" if found else ""
        raise ConfigError(f"{where}: cannot read the options: not TOML{position}") from None


_PARSERS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    ".toml": _parse_toml,
    ".yaml": parse_yaml,
    ".yml": parse_yaml,
}


Policy = TypeVar("Policy", SavePolicy, RetentionPolicy)


@overload
def policy_from(value: Any, kind: Literal["save"]) -> SavePolicy: ...
@overload
def policy_from(value: Any, kind: Literal["keep"]) -> RetentionPolicy: ...
@overload
def policy_from(value: Any, kind: str) -> SavePolicy | RetentionPolicy: ...
def policy_from(value: Any, kind: str) -> SavePolicy | RetentionPolicy:
    """Build a policy from a policy, a mapping, or a list of them, joined by "or".

    Args:
        value: e.g. `{"every_steps": 500, "on_preemption": True}` or `[KeepLatest(3), {"every": 10_000}]`; a
            number alone is the number of steps between saves, or of checkpoints to keep.
        kind: `save` for when to save, `keep` for what to keep.

    Raises:
        ConfigError: invalid policies; the message lists all of them.
    """
    require("policy_from", one_of("kind", kind, ("save", "keep")))
    return _any_of(value, _SAVE, kind) if kind == "save" else _any_of(value, _KEEP, kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grammar(Generic[Policy]):
    """The vocabulary of one kind of policy; builders return None for a switch off."""

    base: type[SavePolicy] | type[RetentionPolicy]
    joined: Callable[[list[Any]], Any]
    number: Callable[[int], Policy]
    builders: Mapping[str, Callable[[Any], Policy | None]]


def _members(value: Any, grammar: _Grammar[Policy], where: str) -> list[Policy]:
    if is_of_kind(value, grammar.base):
        return [cast("Policy", value)]
    if type(value) is int:
        try:
            return [grammar.number(value)]
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    problems = Problems()
    if isinstance(value, Mapping):
        members = _entries(undotted(value), grammar, where, problems)
    elif isinstance(value, list | tuple):
        members = [
            problems.collect(_any_of, part, grammar, f"{where}[{index}]") for index, part in enumerate(value)
        ]
    else:
        raise ConfigError(f"{where}: expected a policy, a mapping or a list of them, not {value!r}")
    problems.raise_if_any()
    found = [member for member in members if member is not None]
    if not found:
        raise ConfigError(f"{where}: names no policy; leave it out for no policy")
    return found


def _entries(
    mapping: Mapping[Any, Any], grammar: _Grammar[Policy], where: str, problems: Problems
) -> list[Policy | None]:
    builders: Mapping[str, Callable[..., Policy | None]] = grammar.builders
    combinators: Mapping[str, Callable[..., Policy]] = {"any": _any_of, "all_of": _all_of, "not": _none_of}
    problems.unknown(where, mapping, (*builders, *combinators))
    members: list[Policy | None] = []
    for key, value in mapping.items():
        inside = f"{where}.{key}"
        if key in builders:
            members.append(problems.collect(builders[key], value, prefix=f"{inside}: "))
        elif key in combinators:
            members.append(problems.collect(combinators[key], value, grammar, inside))
    return members


def _any_of(value: Any, grammar: _Grammar[Policy], where: str) -> Policy:
    found: Policy = grammar.joined(_members(value, grammar, where))
    return found


def _all_of(value: Any, grammar: _Grammar[Policy], where: str) -> Policy:
    return reduce(operator.and_, _members(value, grammar, where))


def _none_of(value: Any, grammar: _Grammar[Policy], where: str) -> Policy:
    policy: Policy = _any_of(value, grammar, where)
    try:
        return ~policy
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _with(make: Callable[..., Policy], *, switch: bool = False) -> Callable[[Any], Any]:
    """Build a policy from the values of its fields, or from its first alone."""
    first, *others = fields(cast("Any", make))
    arguments, required = [first.name, *(each.name for each in others)], first.default is MISSING

    def build(value: Any) -> Policy | None:
        if switch and isinstance(value, bool):
            return make() if value else None
        if not isinstance(value, Mapping):
            if not required and not switch:
                raise ConfigError(f"must be a mapping of {', '.join(arguments)}, not {value!r:.80}")
            return make(value)
        problems = Problems()
        problems.unknown("arguments", value, arguments)
        if required and first.name not in value:
            problems.add(f"{first.name!r} is missing")
        problems.raise_if_any(separator="; ")
        return make(**value)

    return build


def _all(value: Any) -> RetentionPolicy | None:
    require("switch", boolean("value", value))
    return retention.KeepAll() if value else None


def _on_preemption(value: Any) -> SavePolicy | None:
    given = value if isinstance(value, bool | Mapping) else {"signals": value}
    if isinstance(given, Mapping) and isinstance(given.get("signals"), list):
        given = {**given, "signals": tuple(given["signals"])}
    return cast("SavePolicy | None", _with(cadence.OnPreemption, switch=True)(given))


def _best(value: Any) -> RetentionPolicy:
    build: Callable[[Any], RetentionPolicy] = _with(retention.KeepBest)
    return reduce(operator.or_, map(build, value)) if isinstance(value, list) and value else build(value)


def _weights(value: Any) -> RetentionPolicy:
    rules = (
        {key: each for key, each in value.items() if key != "dtype"} if isinstance(value, Mapping) else value
    )
    dtype = value.get("dtype") if isinstance(value, Mapping) else None
    return retention.KeepWeights(_any_of(rules, _KEEP, "weights"), dtype=dtype)


_SAVE: _Grammar[SavePolicy] = _Grammar(
    base=SavePolicy,
    joined=lambda policies: reduce(operator.or_, policies),
    number=cadence.EverySteps,
    builders={
        "every_steps": _with(cadence.EverySteps),
        "at_steps": _with(cadence.AtSteps),
        "every_seconds": _with(cadence.EverySeconds),
        "every_fraction": _with(cadence.EveryFraction),
        "every_epochs": _with(cadence.EveryEpochs),
        "every_tokens": _with(cadence.EveryTokens),
        "optimal": _with(cadence.Optimal, switch=True),
        "max_overhead": _with(cadence.MaxOverhead),
        "continuous": _with(cadence.Continuous, switch=True),
        "on_preemption": _on_preemption,
    },
)
_KEEP: _Grammar[RetentionPolicy] = _Grammar(
    base=RetentionPolicy,
    joined=retention.any_of,
    number=retention.KeepLatest,
    builders={
        "latest": _with(retention.KeepLatest),
        "every": _with(retention.KeepEvery),
        "every_fraction": _with(retention.KeepEveryFraction),
        "every_epochs": _with(retention.KeepEveryEpochs),
        "every_seconds": _with(retention.KeepEverySeconds),
        "best": _best,
        "for": _with(retention.KeepFor),
        "thinned": _with(retention.KeepThinned),
        "within": _with(retention.KeepWithin),
        "steps": _with(retention.KeepSteps),
        "weights": _weights,
        "all": _all,
    },
)
