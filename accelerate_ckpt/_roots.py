"""Settings, and the roots of one accelerator: those users name, or stock's own.

Settings come from arguments, else the environment, else a file, else the defaults. `accelerate config`
exports a fixed list of variables and knows no plug-ins. So there are two carriers, in the idiom of its own
plug-ins: `CKPT_SUITE_<NAME>` for one setting, `CKPT_SUITE_CONFIG` for a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, final

from accelerate import Accelerator

from accelerate_ckpt._small_files import Pickles
from ckpt_core import CheckpointManager, CheckpointOptions, ConfigError, CorruptCheckpointError, LoadError
from ckpt_core.commit import Occupant, file_as_root
from ckpt_core.coordination import HOST_VARIABLE, Coordinator, Solo
from ckpt_core.disclosure import logger_of
from ckpt_core.hosting import CheckpointPath, ManagersByRoot, RunRoot, is_torn, kind_of, root_of
from ckpt_core.names import MARKER
from ckpt_core.options import parse_yaml, read_document
from ckpt_core.policies import RetentionPolicy
from ckpt_core.provenance import CODE_VERSION_VARIABLE
from ckpt_core.state import Contents, Override, contents_problem
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Log, NumbersSink, Sink
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import boolean, require
from ckpt_core.vocabulary import instead_of_option

PREFIX = "CKPT_SUITE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
SECTION = "ckpt"

_OF_THE_CORE = frozenset({FILE_VARIABLE, HOST_VARIABLE, CODE_VERSION_VARIABLE})
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
        stock_files: whether plain replicas get single files for the stock loader; None as the host does.
        gradients: whether saves within an accumulation window hold its gradients.
        safe: whether single files of weights are safetensors.
        given: the names of settings that were given; the others are defaults.
    """

    options: CheckpointOptions
    pickles: Pickles = field(compare=False, repr=False)
    root: str | os.PathLike[str] | Storage | None = field(default=None, repr=False)
    stock_files: bool | None = None
    override: Override = field(default_factory=Override)
    gradients: bool = False
    contents: Contents | None = None
    log_costs: bool = True
    safe: bool = True
    given: frozenset[str] = frozenset()

    @classmethod
    def resolve(cls, explicit: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Self:
        """Collect the settings from all carriers; None in `explicit` means not given."""
        given = {name: value for name, value in explicit.items() if value is not None}
        _refuse_unknown(given, _NAMES, "no such option")
        merged: dict[str, Any] = {**_from_file(environment), **_from_environment(environment), **given}
        names = frozenset(merged)
        own = {name: merged.pop(name) for name in _OWN if name in merged}
        require(
            "settings",
            boolean("stock_files", own.get("stock_files") or False),
            boolean("gradients", own.get("gradients", False)),
            boolean("log_costs", own.get("log_costs", True)),
            contents_problem(own.get("contents")),
        )
        root = own.get("root")
        if root is not None and not isinstance(root, str | os.PathLike | Storage):
            raise ConfigError(f"root must be a directory, a URL or a Storage, not {type(root).__name__}")
        own["override"] = Override.of(own.get("override"))
        options = CheckpointOptions.from_mapping(merged)
        return cls(options=options, pickles=Pickles(allowed=options.allow_pickle), given=names, **own)

    @property
    def of_host(self) -> dict[str, Any]:
        """The settings that the core does not know and that ranks must have alike."""
        return {"contents": self.contents, "gradients": self.gradients, "stock_files": self.stock_files}

    def with_numbers(self, sinks: Sequence[Sink], log: Log) -> Sequence[Sink]:
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
    document, where = read_document(Path(side_file)), f"{side_file}: {SECTION}"
    value = document.get(SECTION, document)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a mapping of options, not {type(value).__name__}")
    options = dict(value)
    _refuse_unknown(options, _NAMES, f"{where}: no such option")
    if isinstance(options.get("root"), int):
        options["root"] = str(options["root"])
    try:
        CheckpointOptions.from_mapping({name: each for name, each in options.items() if name not in _OWN})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return options


_logger = logger_of(__name__)
_AUTOMATIC = re.compile(r"checkpoint_(\d+)(?:\..*)?")
_OF_ONE_ROOT = ("upload", "export", "init_from")
_NO_ROOT = "give enable() a root, or ProjectConfiguration a project_dir with automatic_checkpoint_naming=True"


@final
@dataclass(frozen=True, slots=True)
class KeepAsAccelerate(RetentionPolicy):
    """Keeps the `limit` newest saves, as `total_limit` does, also those of one step.

    An optimizer that was not prepared moves no step.
    """

    limit: int

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        del now
        return frozenset(info.step for info in self._newest_first(history)[: self.limit])

    def surplus(self, history: Sequence[CheckpointInfo]) -> Collection[str]:
        return {info.name for info in self._newest_first(history)[self.limit :]}

    def _newest_first(self, history: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        return sorted(history, key=lambda info: (info.step, info.created), reverse=True)


@final
class Roots:
    """The roots in use by one accelerator.

    Concurrency: main thread; making a manager is collective.
    """

    def __init__(
        self, accelerator: Accelerator, settings: Settings, sinks: Sequence[Sink], *, listen: bool
    ) -> None:
        self._accelerator = accelerator
        self._listen = listen
        self._settings = settings
        self._options = settings.options
        self._sinks = settings.with_numbers(sinks, self._log)
        deadline = settings.options.deadline_seconds
        self._of_all = self.managers = ManagersByRoot(self._make, deadline_seconds=deadline)
        self._of_one = ManagersByRoot(self._make, deadline_seconds=deadline, coordinator=Solo())
        self._ended = set[str]()
        self._given = None if settings.root is None else RunRoot.of(settings.root)
        self._project = ("", "")

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        for tracker in self._accelerator.trackers:
            # W&B drops what comes after a later step: there it is of the step that is being logged.
            tracker.log(dict(numbers), step=None if tracker.name == "wandb" else step)

    def automatic(self) -> CheckpointManager | None:
        root = self._automatic_root()
        return None if root is None else self.managers.at(root)

    def only(self) -> CheckpointManager:
        """Return the manager for automatic names, or of the only root in use."""
        manager = self.automatic()
        if manager is None and len(self.managers.roots) == 1:
            (manager,) = self.managers
        if manager is None:
            raise ConfigError(
                f"there is no single root of checkpoints: name one to load_state(), or {_NO_ROOT}"
            )
        return manager

    def place(self, output_dir: str | os.PathLike[str] | None) -> CheckpointPath:
        """Return where a save with this `output_dir` goes.

        As in stock, automatic naming overrides it.
        """
        root = self._automatic_root(output_dir)
        if root is not None:
            # Stock Accelerate's own name.
            return CheckpointPath(root, f"checkpoint_{self._accelerator.save_iteration}")
        if output_dir is None:
            raise ConfigError(f"there is no directory to save to: give an output_dir, or {_NO_ROOT}")
        return CheckpointPath.of(output_dir)

    def continue_numbering(self) -> None:
        """Set the next automatic number from storage; stock starts at 0 after a restart."""
        manager = self.automatic()
        if manager is not None:
            number = self.managers.once(lambda: _next_number(manager))
            self._accelerator.project_configuration.iteration = number

    def begin_new_runs(self) -> None:
        self._ended.update(self.managers.roots)
        self.managers.close_managers()

    def part(self, who: Literal["all", "alone", "without"]) -> None:
        """Go on with managers of this process alone, or again of all ranks; idempotent.

        Those in use are closed, and wait for no rank, also where the main process has saved without this one.
        """
        wanted = self._of_one if who == "alone" else self._of_all
        if wanted is not self.managers or who == "without":
            origin = self.managers.origin
            self.managers.close_managers(wait_for_uploads=False)
            self.managers = wanted
            if origin is not None:
                wanted.loaded(origin)

    def close(self) -> None:
        self._ended.update(self.managers.roots)
        try:
            self._of_one.close_managers()
        finally:
            self._of_all.close()

    def _automatic_root(self, output_dir: str | os.PathLike[str] | None = None) -> str | None:
        """Return the root for automatic names; None if users name the checkpoint."""
        configuration = self._accelerator.project_configuration
        if self._given is not None:
            named = output_dir is not None and not configuration.automatic_checkpoint_naming
            return None if named else self._given.path
        if not configuration.automatic_checkpoint_naming or configuration.project_dir is None:
            return None
        written = os.path.join(configuration.project_dir, "checkpoints")  # noqa: PTH118 - may be a URL
        if written != self._project[0]:
            self._project = written, root_of(written)
        return self._project[1]

    def _make(self, root: str, coordinator: Coordinator) -> CheckpointManager:
        options = self._options_for(root)
        manager = CheckpointManager(
            root if self._given is None else self._given.opens(root),
            options=replace(options, init_from=None) if root in self._ended else options,
            coordinator=coordinator,
            sinks=self._sinks,
            listen=self._listen,
        )
        manager.same_options.add(**self._settings.of_host)
        # Where users name checkpoints, only those names show which belong together.
        users_names = self._options.keep is None and root != self._automatic_root()
        if root in self._ended or users_names:
            manager.start_afresh()
        return manager

    def _options_for(self, root: str) -> CheckpointOptions:
        limit = self._accelerator.project_configuration.total_limit
        # As in stock, `total_limit` is about automatic names, of whatever run they are; what a user named is
        # only removed on `keep`, and goes nowhere else.
        if root != (automatic := self._automatic_root()):
            names = [name for name in _OF_ONE_ROOT if getattr(self._options, name) is not None]
            if names and automatic is None:
                what = f"{names[0]}= is for the checkpoints of one root"
                raise ConfigError(f"{what}, and {root} is none: {_NO_ROOT}")
            return replace(self._options, upload=None, export=None, init_from=None)
        if self._options.keep is not None or limit is None:
            return self._options
        abandoned = self._options.abandoned if "abandoned" in self._settings.given else "prune"
        return replace(self._options, keep=KeepAsAccelerate(limit), abandoned=abandoned)


def _next_number(manager: CheckpointManager) -> int:
    storage = manager.storage
    try:
        names = [entry.name for entry in storage.list("")]
    except NotADirectoryError:
        raise file_as_root(storage.url) from None
    if manager.options.uploads:
        try:
            names += [info.name for info in manager.checkpoints(abandoned=True)]
        except LoadError as error:
            _logger.warning("the next automatic number is that of %s alone: %s", storage.url, error)
    found = map(_AUTOMATIC.fullmatch, names)
    return max((int(match[1]) + 1 for match in found if match is not None), default=0)


def newest_stock(storage: Storage) -> str | None:
    """Return the directory with the highest number that stock Accelerate wrote."""
    numbered = [
        (int(match[1]), entry.name)
        for entry in storage.list("")
        if (match := _AUTOMATIC.fullmatch(entry.name)) is not None
        and kind_of(storage, entry.name) is Occupant.STOCK
    ]
    return max(numbered)[1] if numbered else None


def found_at(storage: Storage, name: str, *, newest: str) -> Occupant:
    """Return whether a checkpoint of ours, or of the host, is there; on one rank.

    `newest` tells how the host is asked for the newest.

    Raises:
        CorruptCheckpointError: it was never committed.
        ConfigError: it is a file, or holds checkpoints.
    """
    where, kind, inside = f"{storage.url}/{name}", Occupant.NOTHING, list[str]()
    try:
        kind = kind_of(storage, name)
        if kind not in {Occupant.COMMITTED, Occupant.TORN}:
            inside = [
                each.name for each in storage.list(name) if storage.exists(f"{name}/{each.name}/{MARKER}")
            ]
    except NotADirectoryError:
        raise ConfigError(
            f"{where} is no checkpoint: it is a file; give the directory that it is in"
        ) from None
    if kind is Occupant.TORN:
        raise CorruptCheckpointError(
            f"{where} was never committed: its save was interrupted, and nothing was loaded. Load another "
            f"one, or the newest that is whole, by {newest}"
        )
    if inside:
        raise ConfigError(
            f"{where} is no checkpoint: it holds {len(inside)}; load one of them, such as "
            f"{where}/{inside[-1]}, or the newest, by {newest}"
        )
    return kind


def torn_in(storage: Storage) -> list[str]:
    names = [entry.name for entry in storage.list("") if entry.is_directory]
    return [name for name in names if is_torn(storage, name)]
