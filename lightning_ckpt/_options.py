"""Options of the callback and the plugin, and advice on `ModelCheckpoint`'s."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack, cast, final, get_type_hints

from fsspec.registry import known_implementations

from ckpt_core.cadence import needed_counts
from ckpt_core.coordination import Coordinator
from ckpt_core.errors import ConfigError
from ckpt_core.hosting import RunRoot, ranking
from ckpt_core.manager import CheckpointManager
from ckpt_core.options import CheckpointOptions, Export, Upload, signature_with_options
from ckpt_core.policies import RetentionPolicy, SavePolicy
from ckpt_core.retention import KeepBest
from ckpt_core.state import Contents, Override, contents_problem
from ckpt_core.storage import Storage, open_storage
from ckpt_core.telemetry import Log, NumbersSink, Sink
from ckpt_core.tiers import read_through
from ckpt_core.validation import boolean, function, imported, integer, location, require
from ckpt_core.vocabulary import OPTIONS, instead_of_option

TokensInBatch: TypeAlias = Callable[[Any], int]
"""Returns the number of tokens in a batch of this rank."""

_OF_ROOT = ("save", "keep", "upload", "export", "init_from")
_NAMED_BY_STEP = "checkpoints are called step-000000500, and `ckpt ls` shows their metrics"
_NOTHING = {
    "save_on_train_epoch_end": "KeepBest waits for its metric, and EveryEpochs(1) for the epoch's end",
    "save_weights_only": "lightning_ckpt.load_from_checkpoint() reads the weights alone",
    "filename": _NAMED_BY_STEP,
    "auto_insert_metric_name": _NAMED_BY_STEP,
    "enable_version_counter": "a fit that starts afresh never overwrites an earlier run",
    "verbose": "the loggers `ckpt_core` and `lightning_ckpt` report each save",
}
_KEPT = ("monitor", "mode", "save_top_k")
_SAVED = ("every_n_train_steps", "every_n_epochs", "train_time_interval")
_RENAMED = {"save_on_exception": 'on_exception="save"'}

_UNCOUNTED = (
    "EveryTokens needs tokens=, the tokens in a batch of one rank: a number, or a function of the batch, "
    'such as tokens=lambda batch: batch["input_ids"].numel()'
)

_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):?/+(?P<rest>.*)")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The validated options.

    Attributes:
        own: where the run's own checkpoints go; None if only Lightning's own callers save.
        save_last: whether the last step of a training is saved in any case.
        tokens: tokens in a batch of one rank, or what counts them; None if they are not counted.
        contents: what of the model is saved; None to decide by its kind.
        log_costs: whether loggers receive what each save has cost.
    """

    own: RunRoot | None = field(repr=False)
    options: CheckpointOptions
    save_last: bool
    sinks: Sequence[Sink] = ()
    tokens: int | TokensInBatch | None = None
    override: Override = field(default_factory=Override)
    contents: Contents | None = None
    log_costs: bool = True

    @property
    def root(self) -> str | None:
        return None if self.own is None else self.own.path

    @property
    def bests(self) -> tuple[KeepBest, ...]:
        return tuple(ranking(self.options.keep))

    @property
    def best(self) -> KeepBest | None:
        """The policy that defines the best checkpoint; the first of several."""
        return next(iter(self.bests), None)

    def for_root(self, root: str, *, training: bool) -> CheckpointOptions:
        """Return the options of the manager of `root`.

        The save policy is for the run's own root while it trains.

        Outside a fit a preemption would have no effect, so its signal is not caught. A save that is requested
        by path (by a `ModelCheckpoint` or the user) must have been made when it returns, so none is skipped;
        outside the run's own root the caller also decides what stays.
        """
        options = self.options
        if not training or root != self.root:
            options = replace(options, save=None, back_pressure="wait", init_from=None)
        if root != self.root:
            options = replace(options, keep=None, upload=None, export=None)
        return options if "://" in root else replace(options, storage_options={})

    def given(self, root: str) -> str | Storage:
        """Return what to open for a root: the `Storage` given for the run's own, if any."""
        return root if self.own is None else self.own.opens(root)

    def storage_at(self, root: str) -> Storage:
        return open_storage(self.given(root), self.for_root(root, training=False).storage_options)

    def manager(self, root: str, coordinator: Coordinator, *, training: bool, log: Log) -> CheckpointManager:
        """Open the manager of a root; `log` hears what each save has cost."""
        manager = CheckpointManager(
            self.given(root),
            options=self.for_root(root, training=training),
            coordinator=coordinator,
            sinks=(*self.sinks, NumbersSink(log)) if self.log_costs else self.sinks,
        )
        manager.same_options.add(contents=self.contents, save_last=self.save_last)
        return manager

    def readable_at(self, root: str) -> Storage:
        """Open a root for reading: the run's own with its further tiers behind it."""
        return read_through(self.storage_at(root), self.for_root(root, training=False))


class Configured:
    """Base of the callback and the plugin: takes the options of the core and these.

    Args:
        dirpath: directory, fsspec URL (`s3://bucket/run`) or `Storage` of the run's checkpoints; `save`,
            `keep`, `upload`, `export`, `init_from` and `override` need it.
        save_last: whether to save the last step of a training, too.
        tokens: tokens in a batch of one rank, for `EveryTokens`: a number, a function of the batch, or its
            name as "package.module:function".
        override: hyperparameters that a fit changes in the optimizers' parameter groups when it resumes from
            a checkpoint of `dirpath`, such as `{lr: 1e-4}`, once for all restarts. Learning rate schedules
            continue from there.
        contents: `all` of the model, or `trainable`: what is not frozen, with the name and the checksums of
            the rest, by which a load compares the live model; `trainable` for PEFT models if None.
            `LightningModule.load_from_checkpoint` then needs `strict=False`, and compares nothing.
        sinks: receivers of telemetry events.
        log_costs: whether the loggers receive `checkpoint/stall_ms`, `durable_s`, `bytes` and `overhead` of
            every save.

    Raises:
        ConfigError: an option is wrong; the message lists every offender.
    """

    def __init_subclass__(cls) -> None:
        signature = inspect.signature(cls.__init__)
        shown = [each for each in signature.parameters.values() if each.name not in {"self", "words"}]
        cls.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        _, blank, told = inspect.cleandoc(Configured.__doc__ or "").partition("\n\n")
        own, raises, ending = told.partition("\n\nRaises:")
        options = "".join(f"\n    {name}: {text}" for name, text in CheckpointOptions.described().items())
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}{blank}{own}{options}{raises}{ending}"

    def __init__(  # noqa: PLR0913 - every argument is one that LightningCLI shows and YAML may set
        self,
        dirpath: str | Path | Storage | None = None,
        *,
        save_last: bool = True,
        tokens: int | TokensInBatch | str | None = None,
        override: dict[str, Any] | None = None,
        contents: Contents | None = None,
        sinks: Sequence[Sink] = (),
        log_costs: bool = True,
        **options: Any,
    ) -> None:
        known = inspect.signature(type(self)).parameters
        words = {name: value for name, value in options.items() if name not in known}
        require(type(self).__name__, *advice(words, known))
        require(
            type(self).__name__,
            None if dirpath is None or isinstance(dirpath, Storage) else problem_of_root(dirpath),
            boolean("save_last", save_last),
            boolean("log_costs", log_costs),
            contents_problem(contents),
            _problem_of_tokens(tokens),
        )
        if dirpath is None and any(options.get(name) is not None for name in _OF_ROOT):
            raise ConfigError(f"{', '.join(_OF_ROOT)} need dirpath=, the run's directory or URL")
        change = Override.of(override)
        if dirpath is None and change:
            raise ConfigError("override= needs dirpath=, the directory or URL of the run that it changes")
        given = {**options, "storage_options": options.get("storage_options") or {}}
        self.settings = Settings(
            own=None if dirpath is None else RunRoot.of(dirpath),
            options=CheckpointOptions.from_mapping(given),
            save_last=save_last,
            sinks=sinks,
            tokens=tokens if tokens is None or isinstance(tokens, int) else imported("tokens", tokens),
            override=change,
            contents=contents,
            log_costs=log_costs,
        )
        if "tokens" in needed_counts(self.settings.options.save) and tokens is None:
            raise ConfigError(_UNCOUNTED)


def _problem_of_tokens(given: Any) -> str | None:
    if given is None or not isinstance(given, int | float):
        return None if given is None else function("tokens", given)
    return integer("tokens", given, minimum=1)


def _show_options() -> None:
    """Give the constructor every option, with types as YAML writes them.

    It also takes the words of a `ModelCheckpoint` and of others from YAML, which get the same advice there.
    """
    make: Any = Configured.__init__
    own = signature_with_options(make).parameters.values()
    plain = dict[str, Any] | list[Any] | None
    types = {
        **get_type_hints(CheckpointOptions),
        **get_type_hints(make),
        "save": SavePolicy | plain,
        "keep": RetentionPolicy | plain,
        "upload": Upload | str | plain,
        "export": Export | plain,
        "storage_options": dict[str, Any] | None,
    }
    defaults = {"storage_options": None}
    shown = [
        each.replace(annotation=types[each.name], default=defaults.get(each.name, each.default))
        for each in own
    ]
    names = (*_KEPT, *_SAVED, *_RENAMED, *_NOTHING, *OPTIONS)
    words = {name: Any for name in names if name not in types}
    further = cast("Any", Unpack)[cast("Any", TypedDict)("Words", words, total=False)]
    make.__signature__ = inspect.Signature(
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *shown,
            inspect.Parameter("words", inspect.Parameter.VAR_KEYWORD, annotation=further),
        ]
    )


_show_options()


def advice(given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return what to write instead of unknown options, with the values given."""
    found: dict[str, list[str]] = {}
    for name in given:
        found.setdefault(_instead(name, given, known), []).append(f"{name}=")
    verb = {1: "is no option"}
    return [
        f"{', '.join(names)} {verb.get(len(names), 'are no options')} here; {what}"
        for what, names in found.items()
    ]


def _instead(name: str, given: Mapping[str, Any], known: Collection[str]) -> str:
    if name in _KEPT:
        return f"write {_kept(given)}"
    if name in _SAVED:
        return f"write {_saved(given)}"
    if name in _RENAMED:
        return f"write {_RENAMED[name]}"
    if name in _NOTHING:
        return f"write nothing: {_NOTHING[name]}"
    meant = instead_of_option(name, known, given.get(name))
    return meant[2:-1] or f"there are {', '.join(sorted(known))}"


def _kept(given: Mapping[str, Any]) -> str:
    """Return the retention that `ModelCheckpoint` was asked for."""
    metric, mode, number = (given.get(name) for name in _KEPT)
    if metric is None and mode is None and number is not None:
        return "nothing: without keep= all stay" if number == -1 else f"keep=KeepLatest({number})"
    words = [json.dumps(metric or "val_loss", default=str)]
    words += [] if number in {None, 1, -1} else [f"n={number}"]
    words += [] if mode is None else [f"mode={json.dumps(mode, default=str)}"]
    return ("keep=KeepAll() | " if number == -1 else "keep=") + f"KeepBest({', '.join(words)})"


def _saved(given: Mapping[str, Any]) -> str:
    """Return the save policy that `ModelCheckpoint` was asked for."""
    steps, epochs, time = (given.get(name) for name in _SAVED)
    seconds = time.total_seconds() if isinstance(time, timedelta) else time
    values = {"EverySteps": steps, "EveryEpochs": epochs, "EverySeconds": seconds}
    parts = [f"{name}({json.dumps(each, default=str)})" for name, each in values.items() if each]
    return f"save={' | '.join(parts)}" if parts else "nothing: without save= only the last step is saved"


def missing_attribute(kind: str, name: str) -> str:
    """Return why there is no such attribute, and what there is instead."""
    told = "settings.options.save is the policy" if name in _SAVED else _NOTHING.get(name)
    return f"{kind!r} has no {name!r}" + (f": {told}" if told else "")


def problem_of_root(root: str | os.PathLike[str]) -> str | None:
    """Return the problem of a directory or URL as it is written, or None."""
    if root != "" and (problem := location("dirpath", root)) is not None:
        return problem
    text = os.fspath(root)
    if not text.strip():
        return 'dirpath= is empty; write "." for the current directory'
    match = _SCHEME.fullmatch(text)
    scheme = match["scheme"] if match is not None else ""
    if match is None or "://" in text or scheme not in known_implementations:
        return None
    if text[len(scheme)] != ":" and not text[len(scheme) :].startswith("//"):
        return None  # a directory that is called like a service
    return f"dirpath={text!r} is neither a path nor a URL; did you mean {scheme}://{match['rest']}?"
