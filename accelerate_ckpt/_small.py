"""Schedulers, scaler, random states and registered objects: small, and able to refuse their state.

Their files are compared with the manifest and read by us before anything live changes. What was changed is
taken back if anything refuses, on any rank. The stock `load_state` gets what stock alone has written, and
of that neither schedulers nor registered objects, which it would unpickle.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, final

from accelerate import Accelerator

from accelerate_ckpt._scratch import private_directory
from accelerate_ckpt._small_files import Pickles, link_files, verified_files, write_files
from accelerate_ckpt._stock import StockMethods, large_things_only, small_things_only
from ckpt_core.dcp import without_pickle
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.state import load_rng_state, rng_state
from ckpt_core.storage import Storage
from ckpt_core.storage import read_small as read_whole

_PATTERNS = ("scheduler*.bin", "scaler.pt", "custom_checkpoint_*.pkl")
_RANDOM_STATES = "random_states_*.pkl"
_SCALER = "scaler.pt"
_SCHEDULER = re.compile(r"scheduler(_\d+)?\.bin")
_OBJECT = re.compile(r"custom_checkpoint_\d+\.pkl")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SmallState:
    """What small files hold, before anything is done with it.

    Attributes:
        loads: what is to take a state, and the state.
        random_states: this rank's file, by name, if stock wrote it; we have random states of our own.
    """

    loads: Sequence[tuple[Any, Any]] = ()
    random_states: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


def small_owners(accelerator: Accelerator) -> dict[str, str]:
    """The small files whose content users may have made, and what each belongs to, in words."""
    schedulers, objects = accelerator._schedulers, accelerator._custom_objects
    return {
        **{_scheduler_file(i): f"scheduler {i}, a {_kind(each)}" for i, each in enumerate(schedulers)},
        **{_object_file(i): f"registered object {i}, a {_kind(each)}" for i, each in enumerate(objects)},
    }


def read_small(
    accelerator: Accelerator, storage: Storage, name: str, pickles: Pickles, *, committed: bool
) -> SmallState:
    """Read the small files of a checkpoint; nothing live is changed.

    Raises:
        CorruptCheckpointError: one of them is missing, or is not what was committed.
        IncompatibleCheckpointError: there is none for something that is to be loaded, or one too many.
        UnsafeCheckpointError: only pickle can read one of them, and that is not allowed.
    """
    own = f"random_states_{accelerator.process_index}.pkl"
    files = _contents(storage, name, (*_PATTERNS, own), committed=committed)
    _check_fit(accelerator, files, name)
    owners = small_owners(accelerator)
    live = [*accelerator._schedulers, *accelerator._custom_objects]
    if accelerator.scaler is not None:
        owners[_SCALER] = "the scaler"
        live.append(accelerator.scaler)
    states = [
        pickles.load(files[path], f"{storage.url}/{name}/{path} ({owner})") for path, owner in owners.items()
    ]
    random_states = {} if committed or own not in files else {own: files[own]}
    return SmallState(loads=list(zip(live, states, strict=True)), random_states=random_states)


def load_small(accelerator: Accelerator, stock: StockMethods, small: SmallState) -> Callable[[], None]:
    """Load what was read from small files; returns what takes it back.

    Raises:
        IncompatibleCheckpointError: something refuses its state; everything is as it was before.
    """
    take_back = _as_it_is(accelerator)
    try:
        if small.random_states:
            with private_directory() as directory, _random_states_only(accelerator):
                write_files(small.random_states, directory)
                stock.load_state(str(directory))
        for each, state in small.loads:
            each.load_state_dict(state)
        _make_scaler_ready(accelerator)
    except Exception as error:  # what users' objects raise is told, as the cause
        take_back()
        raise IncompatibleCheckpointError(
            f"a scheduler, the scaler or a registered object refuses its state: {error!r}"
        ) from error
    return take_back


def load_by_stock(
    accelerator: Accelerator,
    stock: StockMethods,
    directory: Path,
    *,
    small: SmallState,
    pickles: Pickles,
    arguments: Mapping[str, Any],
) -> None:
    """Load a checkpoint that stock wrote: what is small as it was read, the rest by the stock method.

    Raises:
        IncompatibleCheckpointError: something small refuses its state; everything is as it was before.
    """
    large = [
        child.name
        for child in directory.iterdir()
        if not any(fnmatchcase(child.name, pattern) for pattern in (*_PATTERNS, _RANDOM_STATES))
    ]
    take_back = load_small(accelerator, stock, small)
    generators = rng_state()
    try:
        with (
            private_directory() as private,
            large_things_only(accelerator),
            nullcontext() if pickles.allowed else without_pickle(),
        ):
            view = private / directory.name  # hooks may go by it
            view.mkdir()
            link_files(large, directory, view)
            stock.load_state(str(view), **arguments)
    except BaseException:
        take_back()
        raise
    load_rng_state(generators)  # loading may have drawn from them since


def _contents(storage: Storage, name: str, patterns: Sequence[str], *, committed: bool) -> dict[str, bytes]:
    def wanted(path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in patterns)

    if committed:
        return verified_files(storage, name, wanted)
    # Stock wrote it: there is no manifest to go by.
    return {
        entry.name: read_whole(storage, f"{name}/{entry.name}")
        for entry in storage.list(name)
        if not entry.is_directory and wanted(entry.name)
    }


def _check_fit(accelerator: Accelerator, files: Mapping[str, bytes], name: str) -> None:
    """Whether there is a file for everything that is to be loaded.

    Raises:
        IncompatibleCheckpointError: there is not, or one belongs to nothing that is registered.
    """
    objects = {path for path in files if _OBJECT.fullmatch(path)}
    if objects != {_object_file(index) for index in range(len(accelerator._custom_objects))}:
        raise IncompatibleCheckpointError(
            f"checkpoint {name} was saved with {len(objects)} registered objects, and "
            f"{len(accelerator._custom_objects)} are registered now: call "
            "accelerator.register_for_checkpointing() for the same objects before load_state()"
        )
    schedulers = {_scheduler_file(index) for index in range(len(accelerator._schedulers))}
    if not schedulers <= files.keys():  # stock loads the first of more and says nothing, too
        there = sum(_SCHEDULER.fullmatch(path) is not None for path in files)
        raise IncompatibleCheckpointError(
            f"checkpoint {name} was saved with {there} schedulers, and {len(schedulers)} "
            "are prepared now: give accelerator.prepare() those that it was saved with"
        )
    if accelerator.scaler is not None and _SCALER not in files:
        raise IncompatibleCheckpointError(
            f"checkpoint {name} was saved without the gradient scaler of mixed_precision='fp16', which is "
            "on now"
        )


@contextmanager
def _random_states_only(accelerator: Accelerator) -> Generator[None]:
    with small_things_only(accelerator), large_things_only(accelerator):
        yield


def _make_scaler_ready(accelerator: Accelerator) -> None:
    """As stock does for FSDP2, whose optimizer takes a step while stock loads it."""
    scaler: Any = accelerator.scaler
    if scaler is not None and accelerator.is_fsdp2 and scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(scaler._device)


def _as_it_is(accelerator: Accelerator) -> Callable[[], None]:
    scaler = [] if accelerator.scaler is None else [accelerator.scaler]
    holders: list[Any] = [*accelerator._schedulers, *scaler, *accelerator._custom_objects]
    before = [(each, copy.deepcopy(each.state_dict())) for each in holders]
    generators, step = rng_state(), accelerator.step

    def take_back() -> None:
        for each, state in before:
            each.load_state_dict(state)
        load_rng_state(generators)
        accelerator.step = step

    return take_back


def _scheduler_file(index: int) -> str:
    return f"scheduler_{index}.bin" if index else "scheduler.bin"


def _object_file(index: int) -> str:
    return f"custom_checkpoint_{index}.pkl"


def _kind(holder: Any) -> str:
    return type(getattr(holder, "scheduler", holder)).__name__
