"""What is at a path that a Trainer is to resume from: chosen, then verified."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, final

import torch
from transformers import TrainerState
from transformers.trainer import SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import get_last_checkpoint

from accelerate_ckpt._host_calls import private_directory
from accelerate_ckpt._roots import found_at
from accelerate_ckpt._small_files import Pickles, verified_files, write_files
from accelerate_ckpt.trainer._data import DataProgress, Resumed, generators_file, progress_file
from accelerate_ckpt.trainer._session import TrainerSession
from ckpt_core import (
    CheckpointError,
    CheckpointInfo,
    CheckpointManager,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)
from ckpt_core.collective import collective_phase
from ckpt_core.commit import Catalog, Occupant, Survey, require_trusted, verify
from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import check_stock
from ckpt_core.disclosure import logger_of
from ckpt_core.formats.codec import damage
from ckpt_core.groups import local_part
from ckpt_core.hosting import CheckpointPath, kind_of
from ckpt_core.names import METADATA
from ckpt_core.state import derive_rng, load_rng_state, rng_seed, rng_state
from ckpt_core.storage import Storage

_logger = logger_of(__name__)

_NOT_READ = (
    "*.distcp", "rank-*.json", "local-*.json", "chunks-*.json.z", "*/*", "model*.safetensors",
    "pytorch_model*.bin", "adapter_model*", "optimizer.pt", TRAINING_ARGS_NAME,
    generators_file("*", 2), progress_file("*"),
)  # fmt: skip
"""What is verified when it is loaded, or is not read at all: single files for others, other ranks' files."""
_TORCH_FILES = (SCHEDULER_NAME, SCALER_NAME, "rng_state*.pth")
"""What the Trainer reads by `torch.load`; the scheduler we do."""
_NAME = re.compile(r"checkpoint-(\d+)")
_SAVED_AS = re.compile(rf"{_NAME.pattern}(\.run-[0-9a-f]{{8,32}})?")
"""In a bucket, where nothing is replaced, a step may be there several times."""
_SENTINEL = "checkpoint-is-incomplete.txt"
_newest_in: Callable[[str], str | None] = get_last_checkpoint


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """A checkpoint of ours, and the directory that the Trainer reads in its place.

    Attributes:
        view: the directory, of this rank alone: it holds verified small files.
        resumed: the progress in the data, if it holds any.
    """

    checkpoint: str
    view: str
    resumed: Resumed | None


@contextmanager
def chosen(
    session: TrainerSession,
    wanted: str | os.PathLike[str] | bool | None,  # noqa: FBT001 - as in stock
    args: Any,
) -> Generator[Ours | str | bool | None]:
    """Yield what the Trainer is to resume from. Collective.

    Ours is whole when it is yielded, as far as the Trainer itself reads it.
    """
    checkpoint: Any = wanted
    manager = session.manager
    if wanted is True:
        checkpoint = newest_of_tiers(manager, session.managers.coordinator)
        if checkpoint is None:
            _logger.warning(
                "resume_from_checkpoint=True: there is none in %s yet; training begins at step 0%s",
                manager.storage.url,
                _elsewhere(session),
            )
    if checkpoint is None or isinstance(checkpoint, bool):
        _require_change(session, None)
        yield checkpoint
        return
    place, checkpoint = CheckpointPath.of(checkpoint), os.fspath(checkpoint)
    if wanted is not True and place.root == session.root.path:
        manager.fetcher.fetch(name=place.name)
    ours = is_ours(session, checkpoint)
    _require_change(session, place if ours else None)
    require_readable(session, checkpoint, ours=ours)
    if not ours:
        yield checkpoint
        return
    with collective_phase(
        session.managers.coordinator,
        f"{checkpoint} could not be read, and nothing was loaded",
        what="verifying small files",
    ):
        small = _read(session, session.storage_at(place.root), place.name, args)
        first, own = (_progress(small, place.name, rank) for rank in (0, args.process_index))
    with private_directory() as directory:
        view = directory / place.name
        view.mkdir()
        write_files(small, view)
        yield Ours(
            checkpoint=checkpoint,
            view=str(view),
            resumed=None if first is None else Resumed(str(view), first, own),
        )


def is_ours(session: TrainerSession, checkpoint: str) -> bool:
    """Return whether a checkpoint is ours and committed, or else stock's. Collective."""
    place = CheckpointPath.of(checkpoint)
    storage, newest = session.storage_at(place.root), "resume_from_checkpoint=True with its output_dir"
    kind = session.managers.once(lambda: found_at(storage, place.name, newest=newest))
    return kind is Occupant.COMMITTED


def require_readable(session: TrainerSession, checkpoint: str, *, ours: bool) -> None:
    """Refuse what is not trusted, or what stock DCP would unpickle. Collective.

    Stock writes no manifest.
    """
    judge = session.manager.options.manifest_verifier
    place = CheckpointPath.of(checkpoint)
    storage = session.storage_at(place.root)
    if judge is not None:
        session.managers.once(lambda: require_trusted(storage, place.name, judge))
    if ours or session.settings.pickles.allowed:
        return

    def check() -> None:
        path = Path(checkpoint)
        for each in (path, *(path.iterdir() if path.is_dir() else ())):
            if (each / METADATA).exists():
                check_stock(each)

    session.managers.coordinator.run_on_coordinator(check, what="checking what stock DCP wrote")


def _require_change(session: TrainerSession, ours: CheckpointPath | None) -> None:
    """Refuse a training that would not say which hyperparameters were changed."""
    if not session.settings.override or (ours is not None and ours.root == session.root.path):
        return
    raise ConfigError(
        "override= changes a training midway, and this one resumes no checkpoint of ours in "
        f"{session.manager.storage.url}: call "
        "train(resume_from_checkpoint=True), or begin with these values in the script, without override="
    )


def _elsewhere(session: TrainerSession) -> str:
    output = session.output
    last = _newest_in(output) if session.settings.root is not None and Path(output).is_dir() else None
    return "" if last is None else f". {output} holds checkpoints: resume_from_checkpoint={last!r}"


def _read(session: TrainerSession, storage: Storage, name: str, args: Any) -> dict[str, bytes]:
    rank, pickles, where = args.process_index, session.settings.pickles, f"{storage.url}/{name}"
    own = {path for each in {0, rank} for path in (progress_file(each), generators_file(each, 2))}

    def is_read(path: str) -> bool:
        return path in own or not any(fnmatchcase(path, pattern) for pattern in _NOT_READ)

    small = verified_files(storage, name, is_read)
    for path, content in small.items():
        # Whatever is allowed, the Trainer itself reads its own without pickle.
        if not pickles.allowed and any(fnmatchcase(path, each) for each in _TORCH_FILES):
            pickles.load(content, f"{where}/{path}")
    if TRAINER_STATE_NAME in small:
        path = f"{where}/{TRAINER_STATE_NAME}"
        try:
            session.best = TrainerState(**json.loads(small[TRAINER_STATE_NAME])).best_model_checkpoint
        except Exception as error:  # transformers' own code over any content; raised on every rank
            raise damage(path, f"this version of transformers cannot read it ({error!r:.200})") from error
    return _with_own_generators(small, Catalog(storage).manifest(name).world_size, args, pickles)


def newest_of_tiers(manager: CheckpointManager, coordinator: Coordinator) -> str | None:
    """Return what `newest_to_resume` does, once further tiers have made it whole.

    Collective. Damage that is found on the way is made good, too.
    """
    manager.fetcher.fetch()
    while True:
        try:
            checkpoint = coordinator.run_on_coordinator(lambda: newest_to_resume(manager))
        except CorruptCheckpointError:
            if manager.fetcher.fetch() is None:
                raise
        else:
            if manager.fetcher.fetch() is None:
                return checkpoint


def newest_to_resume(manager: CheckpointManager) -> str | None:
    """Return the path of the newest checkpoint that verifies; on one rank.

    It may be ours or the stock Trainer's, which itself takes the highest number, even of a directory that its
    own preemption save left half-written, or of an earlier run.

    Ours are those of the present lineage. Damage that is found is marked, and what `verify_manifest` does not
    accept is passed over, as is what stock wrote where there is such a function. So are leftovers of killed
    saves, and directories of others. Returns None if nothing was ever saved.
    """
    storage, survey = manager.storage, Catalog(manager.storage).survey()
    _, stock, written = max(_whole_stock(storage), default=(0, "", 0.0))
    problems = _unread(survey)
    if stock and manager.options.verify_manifest is not None:
        problems[stock], stock = "it has no manifest to be judged", ""
    for info in (each for each in reversed(survey.committed) if _SAVED_AS.fullmatch(each.name)):
        if stock and written > info.created:
            _logger.warning(
                "%s/%s is newer than %s and was written by the stock Trainer", storage.url, stock, info.name
            )
            break
        if (problem := _problem(manager, info)) is None:
            stock = info.name
            break
        problems[info.name] = problem
    for name, why in problems.items():
        _logger.error("%s/%s is passed over: %s", storage.url, name, why)
    weights = [info.name for info in survey.weights if not info.abandoned]
    if (problems or weights) and not stock:
        left = [info.name for info in survey.abandoned if info.usable]
        raise _nothing_usable(storage, [*problems], weights, left)
    return f"{storage.url}/{stock}" if stock else None


def _unread(survey: Survey) -> dict[str, str]:
    """Return what is wrong with each marker that is damaged; raise any other error."""
    found = {name: error for name, error in survey.unreadable.items() if _SAVED_AS.fullmatch(name)}
    for error in found.values():
        if not isinstance(error, CorruptCheckpointError):
            raise error
    return {name: f"it is damaged: {error}" for name, error in found.items()}


def _nothing_usable(
    storage: Storage, passed: list[str], weights: list[str], left: list[str]
) -> CheckpointError:
    kind = CorruptCheckpointError if passed else IncompatibleCheckpointError
    why = [f"{', '.join(passed)} are damaged, not trusted or marked as bad"] if passed else []
    why += [f"{', '.join(weights)} hold weights alone"] if weights else []
    why += [f"of abandoned runs there are {', '.join(left)}, which can be named"] if left else []
    begin = f", with init_from={f'{storage.url}/{weights[-1]}'!r}" if weights else ""
    return kind(
        f"no checkpoint in {storage.url} can be resumed from: {'; '.join(why)}. Look at each with `ckpt "
        f"verify`, or train into another output_dir{begin}"
    )


def _problem(manager: CheckpointManager, info: CheckpointInfo) -> str | None:
    """Return why a checkpoint cannot be used, or None; mark damage, or unmark it."""
    storage = manager.storage
    try:
        require_trusted(storage, info.name, manager.options.manifest_verifier)
    except UntrustedCheckpointError as error:
        return f"it is not trusted: {error.why}"
    except CorruptCheckpointError:
        pass  # what is wrong with it is found, and marked, when it is verified
    if info.bad is not None:
        return f"it is marked as bad: {info.bad}"
    failures = verify(storage, info.name)
    if failures or info.damaged is not None:
        Catalog(storage).remark(info.name, "; ".join(map(str, failures[:5])))
    return f"it is damaged: {failures[0]}" if failures else None


def _whole_stock(storage: Storage) -> Iterator[tuple[int, str, float]]:
    """Yield step, name and time of stock's finished checkpoints; warn of others."""
    local = local_part(storage)
    for entry in storage.list(""):
        match = _NAME.fullmatch(entry.name) if entry.is_directory else None
        if match is None or (kind := kind_of(storage, entry.name)) is Occupant.COMMITTED:
            continue
        names = {child.name for child in storage.list(entry.name)}
        if kind is not Occupant.STOCK or TRAINER_STATE_NAME not in names or _SENTINEL in names:
            _logger.warning("%s/%s was never finished, and is passed over", storage.url, entry.name)
            continue
        state = None if local is None else local.local_path(f"{entry.name}/{TRAINER_STATE_NAME}")
        yield int(match[1]), entry.name, 0.0 if state is None else state.stat().st_mtime


def _progress(small: Mapping[str, bytes], checkpoint: str, rank: int) -> DataProgress | None:
    path = progress_file(rank)
    return DataProgress.read(small[path], f"{checkpoint}/{path}") if path in small else None


def _with_own_generators(
    small: Mapping[str, bytes], saved_by: int, args: Any, pickles: Pickles
) -> dict[str, bytes]:
    """Return the files, with random states where the Trainer looks for this rank's."""
    rank, left = args.process_index, dict(small)
    names = {each: generators_file(each, saved_by) for each in {0, rank} if each < saved_by}
    saved = {each: left.pop(name) for each, name in names.items() if name in left}
    own = saved.get(rank)
    if own is None and 0 in saved:
        before = rng_state()
        derive_rng(rng_seed(pickles.load(saved[0], names[0])), rank)
        made = rng_state()
        load_rng_state(before)
        buffer = io.BytesIO()
        torch.save({**made, "cpu": made.pop("torch")}, buffer)
        own = buffer.getvalue()
        _logger.warning(
            "rank %d was not among those that saved: its random numbers are derived from rank 0's", rank
        )
    return left if own is None else {**left, generators_file(rank, args.world_size): own}
