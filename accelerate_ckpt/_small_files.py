"""The host's small files in a checkpoint: verified by the manifest, read by us.

What is in them cannot run code unless `allow_pickle` was given. What no manifest names is never seen: host
methods and hooks that insist on reading a directory get one with nothing else in it.

Schedulers, scaler and registered objects are able to refuse their state: it is read before anything live
changes, and what was changed is taken back if anything refuses, on any rank. The stock `load_state` gets what
stock alone has written, and of that neither schedulers nor registered objects, which it would unpickle.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, final

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state
from accelerate.utils.other import TORCH_SAFE_GLOBALS

from accelerate_ckpt._host_calls import private_directory
from ckpt_core.commit import Catalog
from ckpt_core.dcp import checked_zip, load_value, without_pickle
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ALLOW_PICKLE, CheckpointError, IncompatibleCheckpointError
from ckpt_core.hosting import replaced
from ckpt_core.loading import CommittedFiles
from ckpt_core.names import twin_name
from ckpt_core.state import load_rng_state, rng_state
from ckpt_core.storage import Storage
from ckpt_core.storage import read_small as read_whole

_logger = logger_of(__name__)

_PATTERNS = ("scheduler*.bin", "scaler.pt", "custom_checkpoint_*.pkl")
_RANDOM_STATES = "random_states_*.pkl"
_SCALER = "scaler.pt"
_SCHEDULER = re.compile(r"scheduler(_\d+)?\.bin")
_OBJECT = re.compile(r"custom_checkpoint_\d+\.pkl")
_SAFE: list[Any] = [*TORCH_SAFE_GLOBALS]
"""What Accelerate's own reader lets through besides what torch does, and the Trainer's does as well."""


@final
class Pickles:
    """Reads what `torch.save` wrote, and decides whether that may execute pickles."""

    def __init__(self, *, allowed: bool) -> None:
        self.allowed = allowed
        self._looked_at: set[str] = set()

    def load(self, content: bytes, name: str) -> Any:
        checked_zip(content, name, trusted=self.allowed)
        try:
            with torch.serialization.safe_globals(_SAFE):
                return load_value(content, name, allow_pickle=self.allowed)
        except CheckpointError:
            raise
        except Exception as error:  # a foreign pickle raises nearly anything; it is the cause of ours
            raise IncompatibleCheckpointError(f"{name} cannot be read here: {error!r:.500}") from error

    def kept_from_others(self) -> AbstractContextManager[None]:
        """Let the host's own readers unpickle nothing, unless that is allowed."""
        return nullcontext() if self.allowed else without_pickle()

    def warn(self, files: Mapping[str, bytes], owners: Mapping[str, str]) -> None:
        if self.allowed:
            return
        new = (owners.keys() & files.keys()) - self._looked_at
        self._looked_at |= new
        odd = [f"{path} ({owners[path]})" for path in sorted(new) if not _is_plain(files[path])]
        if odd:
            _logger.warning(
                "%s can be read again only by pickle, which could run any code, so that a load refuses it: "
                "keep plain values and tensors instead, or give %s",
                ", ".join(odd),
                ALLOW_PICKLE,
            )


class SmallState(NamedTuple):
    """The content of small files, before any of it is loaded.

    Attributes:
        loads: schedulers, scaler and registered objects, each with its state.
        random_states: this rank's file, by name, if stock wrote it; we have random states of our own.
    """

    loads: Sequence[tuple[Any, Any]] = ()
    random_states: Mapping[str, bytes] = MappingProxyType({})


def verified_files(storage: Storage, name: str, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    files = CommittedFiles(storage, name, Catalog(storage).manifest(name))
    return {path: files.read(path) for path in files.paths if wanted(path)}


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    for path, content in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def link_files(paths: Iterable[str], source: Path, directory: Path) -> None:
    """Link large files of `source` into a directory, instead of copying them."""
    for path in paths:
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        place, twin = source / path, source / twin_name(path)
        target.symlink_to(twin if twin.exists() and not place.exists() else place)


def small_owners(accelerator: Accelerator) -> dict[str, str]:
    """Return the small files that hold users' objects, each with its owner in words."""
    schedulers, objects = accelerator._schedulers, accelerator._custom_objects
    return {
        **{_scheduler_file(i): f"scheduler {i}, a {_kind(each)}" for i, each in enumerate(schedulers)},
        **{_object_file(i): f"registered object {i}, a {_kind(each)}" for i, each in enumerate(objects)},
    }


def read_small(
    accelerator: Accelerator, storage: Storage, name: str, pickles: Pickles, *, committed: bool
) -> SmallState:
    """Read the small files of a checkpoint; nothing live is changed."""
    own = f"random_states_{accelerator.process_index}.pkl"

    def wanted(path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in (*_PATTERNS, own))

    # Of what stock wrote there is no manifest.
    files = (
        verified_files(storage, name, wanted)
        if committed
        else {
            entry.name: read_whole(storage, f"{name}/{entry.name}")
            for entry in storage.list(name)
            if not entry.is_directory and wanted(entry.name)
        }
    )
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
    return SmallState(list(zip(live, states, strict=True)), random_states)


def load_small(accelerator: Accelerator, small: SmallState) -> Callable[[], None]:
    """Load what was read from small files; return a function that undoes it."""
    scaler: Any = accelerator.scaler
    scalers = [] if scaler is None else [scaler]
    holders: list[Any] = [*accelerator._schedulers, *scalers, *accelerator._custom_objects]
    before = [(each, copy.deepcopy(each.state_dict())) for each in holders]
    generators, step = rng_state(), accelerator.step

    def undo() -> None:
        for each, state in before:
            each.load_state_dict(state)
        load_rng_state(generators)
        accelerator.step = step

    try:
        if small.random_states:
            with private_directory() as directory:
                write_files(small.random_states, directory)
                found = load_accelerator_state(str(directory), [], [], [], [], accelerator.process_index)
            accelerator.step = found.get("step", accelerator.step)
        for each, state in small.loads:
            each.load_state_dict(state)
        if scaler is not None and accelerator.is_fsdp2 and scaler._scale is None:
            # FSDP2's optimizer steps while stock loads it, and the scaler with it.
            scaler._lazy_init_scale_growth_tracker(scaler._device)
    except Exception as error:  # what users' objects raise is the cause of ours
        undo()
        raise IncompatibleCheckpointError(
            f"a scheduler, the scaler or a registered object refuses its state: {error!r}"
        ) from error
    return undo


def load_by_stock(
    accelerator: Accelerator,
    stock: SimpleNamespace,
    directory: Path,
    small: SmallState,
    *,
    arguments: Mapping[str, Any],
) -> None:
    """Load a checkpoint of stock: small files as read, the rest by the stock method."""
    large = [
        child.name
        for child in directory.iterdir()
        if not any(fnmatchcase(child.name, pattern) for pattern in (*_PATTERNS, _RANDOM_STATES))
    ]
    undo = load_small(accelerator, small)
    generators = rng_state()
    try:
        nothing_small: dict[str, Any] = {"_schedulers": [], "_custom_objects": [], "scaler": None}
        with private_directory() as private, replaced(accelerator, **nothing_small):
            view = private / directory.name  # hooks may go by it
            view.mkdir()
            link_files(large, directory, view)
            stock.load_state(str(view), **arguments)
    except BaseException:
        undo()
        raise
    load_rng_state(generators)  # loading may have drawn from them since


def _check_fit(accelerator: Accelerator, files: Mapping[str, bytes], name: str) -> None:
    objects = {path for path in files if _OBJECT.fullmatch(path)}
    if objects != {_object_file(index) for index in range(len(accelerator._custom_objects))}:
        raise IncompatibleCheckpointError(
            f"checkpoint {name} was saved with {len(objects)} registered objects, and "
            f"{len(accelerator._custom_objects)} are registered now: call "
            "accelerator.register_for_checkpointing() for the same objects before load_state()"
        )
    schedulers = {_scheduler_file(index) for index in range(len(accelerator._schedulers))}
    if not schedulers <= files.keys():  # stock loads the first of more without a warning, too
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


def _scheduler_file(index: int) -> str:
    return f"scheduler_{index}.bin" if index else "scheduler.bin"


def _object_file(index: int) -> str:
    return f"custom_checkpoint_{index}.pkl"


def _kind(holder: Any) -> str:
    return type(getattr(holder, "scheduler", holder)).__name__


def _is_plain(content: bytes) -> bool:
    try:
        with torch.serialization.safe_globals(_SAFE):
            torch.load(io.BytesIO(content), map_location="meta", weights_only=True)  # no tensor is read
    except Exception:  # noqa: BLE001 - a load would raise it too; the caller warns the user
        return False
    return True
