"""Loading into a Trainer: a checkpoint is chosen, verified, then loaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

from transformers import TrainerState
from transformers.trainer import SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import get_last_checkpoint

from accelerate_ckpt._checkpoints import tell_restored
from accelerate_ckpt._host_calls import private_directory, torch_bytes
from accelerate_ckpt._roots import Settings
from accelerate_ckpt._small_files import Pickles, link_files, verified_files, write_files
from accelerate_ckpt.trainer._callbacks import CallbackStates, ToCome, load_exported
from accelerate_ckpt.trainer._data import DataProgress, Resumed, generators_file, progress_file
from accelerate_ckpt.trainer._session import TrainerSession
from accelerate_ckpt.trainer._state import TrainingState
from ckpt_core import (
    CheckpointError,
    CheckpointInfo,
    CheckpointManager,
    ConfigError,
    CorruptCheckpointError,
    UntrustedCheckpointError,
)
from ckpt_core.collective import collective_phase
from ckpt_core.commit import Catalog, require_trusted, verify
from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import check_stock, without_pickle
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import FileFailure
from ckpt_core.groups import local_part
from ckpt_core.hosting import CheckpointPath, Kind, kind_of, root_of
from ckpt_core.names import METADATA
from ckpt_core.state import StateSource, derive_rng, load_item, load_rng_state, rng_seed, rng_state
from ckpt_core.storage import Storage

_logger = logger_of(__name__)

_OURS = ("*.distcp", "rank-*.json", "local-*.json", "chunks-*.json.z")
_NOT_READ = (
    *_OURS, "*/*", "model*.safetensors", "pytorch_model*.bin", "adapter_model*", "optimizer.pt",
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
class _Lent:
    """The directory that the Trainer resumes from, in place of the checkpoint itself."""

    view: str
    checkpoint: str
    scheduler: bytes | None
    resumed: Resumed | None


@final
class TrainerLoading:
    """Loads checkpoints into a Trainer; every method is collective."""

    def __init__(
        self, trainer: Any, stock: SimpleNamespace, session: TrainerSession, settings: Settings
    ) -> None:
        self._trainer = trainer
        self._stock = stock
        self._session = session
        self._state = partial(TrainingState, trainer, stock, settings)
        self._lent: _Lent | None = None
        self._loaded: tuple[str, ToCome] | None = None

    @property
    def view(self) -> str:
        """The directory that the Trainer resumes from now."""
        assert self._lent is not None
        return self._lent.view

    @property
    def resumed(self) -> Resumed | None:
        """The progress in the checkpoint that was chosen, if it holds any."""
        return None if self._lent is None else self._lent.resumed

    @contextmanager
    def chosen(self, wanted: str | os.PathLike[str] | bool | None) -> Generator[Any]:  # noqa: FBT001 - as in stock
        """Yield what the Trainer is to resume from.

        For a checkpoint of ours it is a directory with what was committed, verified.
        """
        checkpoint: Any = wanted
        if wanted is True:
            manager = self._session.manager
            checkpoint = newest_of_tiers(manager, self._session.coordinator)
            if checkpoint is None:
                _logger.warning(
                    "resume_from_checkpoint=True: there is none in %s yet; training begins at step 0%s",
                    manager.storage.url,
                    self._elsewhere(),
                )
        if checkpoint is None or isinstance(checkpoint, bool):
            self._require_change(None)
            yield checkpoint
            return
        place = CheckpointPath.of(checkpoint)
        if wanted is not True and place.root == root_of(self._session.manager.storage.url):
            self._session.manager.fetcher.fetch(name=place.name)
        ours = self._is_ours(checkpoint)
        self._require_change(checkpoint if ours else None)
        self._require_trusted(checkpoint)
        if ours:
            with self._committed(checkpoint) as view:
                yield str(view)
        else:
            self._check_stock(checkpoint)
            yield os.fspath(checkpoint)

    def _require_change(self, checkpoint: str | os.PathLike[str] | None) -> None:
        """Refuse a training that would not say which hyperparameters were changed."""
        url = self._session.manager.storage.url
        if not self._session.override or (checkpoint and CheckpointPath.of(checkpoint).root == root_of(url)):
            return
        raise ConfigError(
            f"override= changes a training midway, and this one resumes no checkpoint of ours in {url}: call "
            "train(resume_from_checkpoint=True), or begin with these values in the script, without override="
        )

    def load_model(self, checkpoint: str, model: Any = None) -> None:
        """Load the model of a stock checkpoint; ours is loaded with its optimizer."""
        if not self._is_ours(checkpoint):
            with self._unpickling_nothing():
                self._stock._load_from_checkpoint(checkpoint, model)

    def load_rest(self, checkpoint: str | None) -> None:
        """Load model, optimizer and scheduler of ours, or the rest of a stock checkpoint."""
        if checkpoint is None:
            self._stock._load_optimizer_and_scheduler(checkpoint)
        elif not self._is_ours(checkpoint):
            with self._unpickling_nothing():
                self._stock._load_optimizer_and_scheduler(checkpoint)
        else:
            lent = self._lent if self._lent is not None and self._lent.view == checkpoint else None
            origin = checkpoint if lent is None else lent.checkpoint
            state = self._state(storage=self._session.storage_at(CheckpointPath.of(origin).root))
            if self._load(origin, state, change=self._session.override.values):
                self._session.saved_step = None
            self._loaded = origin, state.to_come
            if lent is not None and lent.scheduler is not None and self._trainer.lr_scheduler is not None:
                name = f"{lent.checkpoint}/{SCHEDULER_NAME}"
                saved = self._session.pickles.load(lent.scheduler, name)
                load_item("the scheduler", self._trainer.lr_scheduler, saved)
            state.apply_change()

    def load_callbacks(self) -> ToCome | None:
        """Load the state of callbacks, once all of them have begun to train.

        Returns:
            What is still to come of the step that was resumed; None if no checkpoint of ours was.
        """
        found, self._loaded = self._loaded, None
        if found is None:
            return None
        origin, to_come = found
        if callbacks := CallbackStates(self._trainer):
            self._load(origin, callbacks)
        load_exported(self._trainer)
        if self._trainer.args.process_index == 0:
            place = CheckpointPath.of(origin)
            tell_restored(self._trainer.state.global_step, place.root, place.name)
        return to_come

    def load_best(self) -> None:
        """Load the model of the best checkpoint."""
        self._session.manager.wait()
        best = self._trainer.state.best_model_checkpoint
        if best is not None and self._is_ours(best):
            storage = self._session.storage_at(CheckpointPath.of(best).root)
            state = self._state(with_optimizer=False, storage=storage)
            self._load(best, state, items=["model"])
        else:
            if best is not None:
                self._require_trusted(best)
                self._check_stock(best)
            with self._unpickling_nothing():
                self._stock._load_best_model()

    def _load(
        self,
        checkpoint: str,
        state: StateSource,
        *,
        items: Sequence[str] | None = None,
        change: Mapping[str, Any] | None = None,
    ) -> bool:
        """Load, and return whether it is a checkpoint of the run's own root."""
        place, manager = CheckpointPath.of(checkpoint), self._session.manager
        if place.root == root_of(manager.storage.url):
            manager.load(state, name=place.name, items=items, override=change)
            return True
        options = replace(manager.options, save=None, keep=None)
        storage = self._session.storage_at(place.root)
        with CheckpointManager(storage, coordinator=self._session.coordinator, options=options) as other:
            other.load(state, name=place.name, items=items)
            manager.begin_from(other)
        return False

    def _require_trusted(self, checkpoint: str | os.PathLike[str]) -> None:
        """Refuse what `verify_manifest` does not accept; stock writes no manifest."""
        verify = self._session.manager.options.manifest_verifier
        place = CheckpointPath.of(checkpoint)
        if verify is not None:
            storage = self._session.storage_at(place.root)
            self._session.coordinator.run_on_coordinator(lambda: require_trusted(storage, place.name, verify))

    def _is_ours(self, checkpoint: str | os.PathLike[str]) -> bool:
        if self._lent is not None and self._lent.view == checkpoint:
            return True
        place = CheckpointPath.of(checkpoint)
        storage = self._session.storage_at(place.root)
        kind, inside = self._session.coordinator.run_on_coordinator(
            lambda: (kind_of(storage, place.name), self._checkpoints_in(checkpoint))
        )
        if kind is Kind.TORN:
            raise CorruptCheckpointError(
                f"{checkpoint} was never committed: its save was interrupted, and nothing was loaded. Use "
                "resume_from_checkpoint=True to get the newest that is whole"
            )
        if kind is not Kind.COMMITTED and inside:
            raise ConfigError(
                f"{checkpoint} is no checkpoint, but holds {len(inside)}: resume from one of them, such as "
                f"{checkpoint}/{inside[-1]}, or set output_dir to it and resume_from_checkpoint=True"
            )
        return kind is Kind.COMMITTED

    @contextmanager
    def _committed(self, checkpoint: str | os.PathLike[str]) -> Generator[Path]:
        """Yield a directory for the Trainer to read: small files verified, others linked."""
        place, coordinator = CheckpointPath.of(checkpoint), self._session.coordinator
        storage = self._session.storage_at(place.root)
        untouched = f"{checkpoint} could not be read, and nothing was loaded"
        with collective_phase(coordinator, untouched, what="verifying small files"):
            small, others = self._read(storage, place.name)
            progress = progress_in(small, place.name, self._trainer.args.process_index)
        with private_directory() as directory:
            view = directory / place.name
            view.mkdir()
            write_files(small, view)
            if (local := local_part(storage)) is not None:
                link_files(others, local.local_path(place.name), view)
            self._lent = _Lent(
                view=str(view),
                checkpoint=os.fspath(checkpoint),
                scheduler=small.get(SCHEDULER_NAME),
                resumed=None if progress is None else Resumed(str(view), *progress),
            )
            try:
                yield view
            finally:
                self._lent = None

    def _read(self, storage: Storage, name: str) -> tuple[dict[str, bytes], list[str]]:
        """Return the files that the Trainer reads, and paths that others may look for."""
        rank = self._trainer.args.process_index
        small = verified_files(storage, name, lambda path: _is_read(path, rank))
        for path, content in small.items():
            # Whatever is allowed, the Trainer itself reads its own without pickle.
            if not self._session.pickles.allowed and any(fnmatchcase(path, each) for each in _TORCH_FILES):
                self._session.pickles.load(content, f"{storage.url}/{name}/{path}")
        if TRAINER_STATE_NAME in small:
            state = _state_in(small[TRAINER_STATE_NAME], f"{storage.url}/{name}/{TRAINER_STATE_NAME}")
            self._session.best = state.best_model_checkpoint
        manifest = Catalog(storage).manifest(name)
        paths = [entry.path for entry in manifest.originals]
        parts = {path.rpartition("/")[0] for path in paths if path.endswith(f"/{METADATA}")}
        others = [
            path
            for path in paths
            if path not in small
            and path.rpartition("/")[0] not in parts
            and not any(fnmatchcase(path, each) for each in _OURS)
        ]
        small.pop(TRAINING_ARGS_NAME, None)
        return with_own_generators(
            small, manifest.world_size, self._trainer.args, self._session.pickles
        ), others

    def _checkpoints_in(self, directory: str | os.PathLike[str]) -> list[str]:
        if "://" not in os.fspath(directory) and not Path(directory).is_dir():
            return []
        storage = self._session.storage_at(root_of(directory))
        return [info.name for info in Catalog(storage).committed()]

    def _elsewhere(self) -> str:
        """Return a hint at checkpoints in the output directory, if none are saved there."""
        output = self._session.output
        last = _newest_in(output) if output is not None and Path(output).is_dir() else None
        return "" if last is None else f". {output} holds checkpoints: resume_from_checkpoint={last!r}"

    def _check_stock(self, checkpoint: str | os.PathLike[str]) -> None:
        """Refuse what stock DCP would unpickle there; collective."""
        if self._session.pickles.allowed:
            return

        def check() -> None:
            place = Path(checkpoint)
            for each in (place, *(place.iterdir() if place.is_dir() else ())):
                if (each / METADATA).exists():
                    check_stock(each)

        self._session.coordinator.run_on_coordinator(check, what="checking what stock DCP wrote")

    def _unpickling_nothing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._session.pickles.allowed else without_pickle()


def _is_read(path: str, rank: int) -> bool:
    return path in of_rank(rank) or not any(fnmatchcase(path, pattern) for pattern in _NOT_READ)


def _state_in(content: bytes, path: str) -> TrainerState:
    try:
        return TrainerState(**json.loads(content))
    except Exception as error:  # transformers' own code over any content; the caller raises on every rank
        problem = f"this version of transformers cannot read it ({error!r:.200})"
        failure = FileFailure(path=path, problem=problem)
        raise CorruptCheckpointError(str(failure), failures=(failure,)) from error


@final
@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Stock:
    """A checkpoint of the stock Trainer that looks finished."""

    step: int
    name: str
    written: float


def newest_of_tiers(manager: CheckpointManager, coordinator: Coordinator) -> str | None:
    """Return what `newest_to_resume` does, once further tiers have made it whole.

    Collective. Damage that is found on the way is made good, too.
    """
    manager.fetcher.fetch()
    while True:
        failure: CorruptCheckpointError | None = None
        checkpoint: str | None = None
        try:
            checkpoint = coordinator.run_on_coordinator(lambda: newest_to_resume(manager))
        except CorruptCheckpointError as error:
            failure = error
        if manager.fetcher.fetch() is None:
            if failure is not None:
                raise failure
            return checkpoint


def newest_to_resume(manager: CheckpointManager) -> str | None:
    """Return the path of the newest checkpoint that verifies; on one rank.

    It may be ours or the stock Trainer's, which itself takes the highest number, even of a directory that its
    own preemption save left half-written, or of an earlier run.

    Ours are those of the present lineage. Damage that is found is marked, and what `verify_manifest` does not
    accept is passed over, as is what stock wrote where there is such a function. So are leftovers of killed
    saves, and directories of others. Returns None if nothing was ever saved.
    """
    storage = manager.storage
    stock = max(_whole_stock(storage), default=None)
    survey = Catalog(storage).survey()
    passed = [
        _refused(storage, name, error)
        for name, error in survey.unreadable.items()
        if _SAVED_AS.fullmatch(name)
    ]
    if stock is not None and manager.options.verify_manifest is not None:
        passed.append(stock.name)
        _logger.error("%s/%s is passed over: it has no manifest to be judged", storage.url, stock.name)
        stock = None
    for info in reversed(survey.committed):
        if _SAVED_AS.fullmatch(info.name) is None:
            continue
        if stock is not None and stock.written > info.created:
            _logger.warning(
                "%s/%s is newer than %s and was written by the stock Trainer",
                storage.url,
                stock.name,
                info.name,
            )
            break
        problem = _untrusted(manager, info) or _problem(storage, info)
        if problem is None:
            return f"{storage.url}/{info.name}"
        passed.append(info.name)
        _logger.error("%s/%s is passed over: %s", storage.url, info.name, problem)
    if stock is not None:
        return f"{storage.url}/{stock.name}"
    if not passed:
        return None
    left = [info.name for info in survey.abandoned if info.usable]
    others = f"; of abandoned runs there are {', '.join(left)}, which can be named" if left else ""
    raise CorruptCheckpointError(
        f"no checkpoint in {storage.url} can be resumed from: {', '.join(passed)} are damaged, not trusted "
        f"or marked as bad{others}. Look at each with `ckpt verify`, or train into another output_dir"
    )


def _refused(storage: Storage, name: str, error: CheckpointError | OSError) -> str:
    """Pass over a checkpoint whose marker is damaged; raise any other error."""
    if not isinstance(error, CorruptCheckpointError):
        raise error
    _logger.error("%s/%s is passed over: it is damaged: %s", storage.url, name, error)
    return name


def _untrusted(manager: CheckpointManager, info: CheckpointInfo) -> str | None:
    """Return why a checkpoint is not trusted, or None; leave it unmarked."""
    try:
        require_trusted(manager.storage, info.name, manager.options.manifest_verifier)
    except UntrustedCheckpointError as error:
        return f"it is not trusted: {error.why}"
    except CorruptCheckpointError:
        return None  # what is wrong with it is found, and marked, when it is verified
    return None


def _problem(storage: Storage, info: CheckpointInfo) -> str | None:
    """Return why a checkpoint cannot be used, or None; mark or unmark it accordingly."""
    if info.bad is not None:
        return f"it is marked as bad: {info.bad}"
    failures = verify(storage, info.name)
    problem = f"it is damaged: {failures[0]}" if failures else None
    catalog = Catalog(storage)
    try:
        if problem is not None:
            catalog.mark_damaged(info.name, "; ".join(str(failure) for failure in failures[:5]))
        elif info.damaged is not None:
            catalog.unmark(info.name)
    except (CheckpointError, OSError) as error:
        _logger.warning("%s/%s: its mark could not be changed: %s", storage.url, info.name, error)
    return problem


def _whole_stock(storage: Storage) -> list[_Stock]:
    """Return the finished checkpoints of the stock Trainer; warn of unfinished ones."""
    whole: list[_Stock] = []
    for entry in storage.list(""):
        match = _NAME.fullmatch(entry.name)
        if match is None or not entry.is_directory:
            continue
        kind = kind_of(storage, entry.name)
        if kind is Kind.COMMITTED:
            continue
        names = {child.name for child in storage.list(entry.name)}
        if kind is Kind.STOCK and TRAINER_STATE_NAME in names and _SENTINEL not in names:
            whole.append(_Stock(step=int(match[1]), name=entry.name, written=_written(storage, entry.name)))
        else:
            _logger.warning("%s/%s was never finished, and is passed over", storage.url, entry.name)
    return whole


def _written(storage: Storage, name: str) -> float:
    local = local_part(storage)
    if local is None:
        return 0.0
    return local.local_path(f"{name}/{TRAINER_STATE_NAME}").stat().st_mtime


def of_rank(rank: int) -> set[str]:
    """Return the files that a rank reads: its own, and the first rank's."""
    return {name for each in {0, rank} for name in (progress_file(each), generators_file(each, 2))}


def progress_in(
    small: Mapping[str, bytes], checkpoint: str, rank: int
) -> tuple[DataProgress, DataProgress | None] | None:
    """Return the first rank's progress and this rank's own, if there is any."""
    own, first = progress_file(rank), progress_file(0)
    found = {
        path: DataProgress.read(small[path], f"{checkpoint}/{path}") for path in (own, first) if path in small
    }
    return (found[first], found.get(own)) if first in found else None


def with_own_generators(
    small: Mapping[str, bytes], saved_by: int, args: Any, pickles: Pickles
) -> dict[str, bytes]:
    """Return the files, with random states where the Trainer looks for this rank's."""
    rank, left = args.process_index, dict(small)
    names = {each: generators_file(each, saved_by) for each in {0, rank} if each < saved_by}
    saved = {each: left.pop(name) for each, name in names.items() if name in left}
    own = saved.get(rank)
    if own is None and 0 in saved:
        own = _derived(pickles.load(saved[0], names[0]), rank)
    return left if own is None else {**left, generators_file(rank, args.world_size): own}


def _derived(first: Mapping[str, Any], rank: int) -> bytes:
    before = rng_state()
    derive_rng(rng_seed(first), rank)
    made = rng_state()
    load_rng_state(before)
    _logger.warning(
        "rank %d was not among those that saved: its random numbers are derived from rank 0's", rank
    )
    return torch_bytes({**made, "cpu": made.pop("torch")})
