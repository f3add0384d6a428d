"""Settings from arguments, else the environment, else a file, else the defaults.

`accelerate config` exports a fixed list of variables to the workers and knows no plug-ins. So there are two
carriers, in the idiom of its own plug-ins: `CKPT_SUITE_<NAME>` for one setting, `CKPT_SUITE_CONFIG` for a
file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, final

from ckpt_core import CheckpointOptions, ConfigError
from ckpt_core.options import parse_yaml, read_document
from ckpt_core.provenance import CODE_VERSION_VARIABLE
from ckpt_core.state import Contents, Override, contents_problem
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Log, NumbersSink, Sink
from ckpt_core.validation import boolean, require
from ckpt_core.vocabulary import instead_of_option

PREFIX = "CKPT_SUITE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
SECTION = "ckpt"

_OF_THE_CORE = frozenset({FILE_VARIABLE, CODE_VERSION_VARIABLE})
"""Variables with our prefix that are no settings."""

_OWN = ("root", "stock_files", "override", "gradients", "contents", "log_costs")
_NAMES = (*_OWN, *(each.name for each in fields(CheckpointOptions)))
_FLAGS = (each.name for each in fields(CheckpointOptions) if type(each.default) is bool)
_SWITCHES = ("stock_files", "gradients", "log_costs", "verify", *_FLAGS)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything `enable` needs to know.

    Attributes:
        root: where automatic names go.
        stock_files: whether plain replicas get single files for the stock loader; None as the host does.
        gradients: whether saves within an accumulation window hold its gradients.
        contents: what of models is saved; None to decide by their kind.
        log_costs: whether trackers receive what each save has cost.
        given: the names of settings that were given; the others are defaults.
    """

    root: str | os.PathLike[str] | Storage | None = field(repr=False)
    stock_files: bool | None
    options: CheckpointOptions
    override: Override = field(default_factory=Override)
    gradients: bool = False
    contents: Contents | None = None
    log_costs: bool = True
    given: frozenset[str] = frozenset()

    @classmethod
    def resolve(
        cls,
        explicit: Mapping[str, Any],
        environment: Mapping[str, str] = os.environ,
    ) -> Self:
        """Collect the settings from all carriers; None in `explicit` means not given.

        Args:
            explicit: the arguments of the script.
            environment: where `CKPT_SUITE_…` is looked for.

        Raises:
            ConfigError: one of them is wrong; the message names its source.
        """
        given = {name: value for name, value in explicit.items() if value is not None}
        _refuse_unknown(given, _NAMES, "no such option")
        merged: dict[str, Any] = {**_from_file(environment), **_from_environment(environment), **given}
        names = frozenset(merged)
        stock_files, gradients = merged.pop("stock_files", None), merged.pop("gradients", False)
        contents, log_costs = merged.pop("contents", None), merged.pop("log_costs", True)
        require(
            "settings",
            boolean("stock_files", stock_files or False),
            boolean("gradients", gradients),
            boolean("log_costs", log_costs),
            contents_problem(contents),
        )
        root = merged.pop("root", None)
        if root is not None and not isinstance(root, str | os.PathLike | Storage):
            raise ConfigError(f"root must be a directory, a URL or a Storage, not {type(root).__name__}")
        override = Override.of(merged.pop("override", None))
        options = CheckpointOptions.from_mapping(merged)
        return cls(
            root=root,
            stock_files=stock_files,
            options=options,
            override=override,
            gradients=gradients,
            contents=contents,
            log_costs=log_costs,
            given=names,
        )

    @property
    def of_host(self) -> dict[str, Any]:
        """The settings that the core does not know and that ranks must have alike."""
        return {"contents": self.contents, "gradients": self.gradients, "stock_files": self.stock_files}

    def with_numbers(self, sinks: Sequence[Sink], log: Log) -> Sequence[Sink]:
        """Return the sinks of the managers, with one that logs what each save has cost."""
        return (*sinks, NumbersSink(log)) if self.log_costs else sinks


def _refuse_unknown(found: Mapping[str, Any], known: Collection[str], problem: str) -> None:
    for name in sorted(map(str, found)):
        if name not in known:
            meant = instead_of_option(name, known, found.get(name))
            raise ConfigError(f"{problem}: {name}{meant}; there are {', '.join(known)}")


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    known = (*(PREFIX + each.upper() for each in _NAMES), FILE_VARIABLE)
    for variable, text in environment.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or variable in _OF_THE_CORE:
            continue
        _refuse_unknown({variable: text}, known, "no such variable")
        # A root may look like a number: it is a job's.
        value = text if name == "root" else parse_yaml(text, variable)
        # Accelerate's own variables are 0 or 1.
        found[name] = bool(value) if name in _SWITCHES and value in (0, 1) else value
    return found


def _from_file(environment: Mapping[str, str]) -> Mapping[str, Any]:
    side_file = environment.get(FILE_VARIABLE)
    if not side_file:
        return {}
    document = read_document(Path(side_file))
    return _options(document.get(SECTION, document), f"{side_file}: {SECTION}")


def _options(value: Any, where: str) -> Mapping[str, Any]:
    """Return the options that a file holds; errors name the file."""
    options = dict(_mapping(value, where))
    _refuse_unknown(options, _NAMES, f"{where}: no such option")
    if isinstance(options.get("root"), int):
        options["root"] = str(options["root"])
    try:
        CheckpointOptions.from_mapping({name: each for name, each in options.items() if name not in _OWN})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return options


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a mapping of options, not {type(value).__name__}")
    return value
