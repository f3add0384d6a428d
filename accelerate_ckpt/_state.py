"""The training state of an accelerator, in the layout of stock Accelerate.

    pytorch_model_fsdp_{i}/   DCP, {"model": …}          optimizer_{i}/   DCP, {"optimizer": …}
    gradients_{i}/            DCP, {"gradients": …}, within an accumulation window, if they are asked for
    scheduler.bin, scaler.pt, random_states_{rank}.pkl, custom_checkpoint_{i}.pkl     written by stock
    model.safetensors, optimizer.bin                     for the stock loader of plain replicas
    custom_checkpoint_{i}/    DCP, {"object": …}, for a registered object with shards; its file is empty

Loader positions and random states are our own items: stock has no place for the first, and loses the second
when there are more ranks than before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from accelerate import Accelerator
from accelerate.checkpointing import save_accelerator_state, save_custom_state
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_ckpt._host_calls import (
    files_in,
    private_directory,
    run_load_hooks,
    run_save_hooks,
)
from accelerate_ckpt._loaders import positions_in_samples
from accelerate_ckpt._progress import Progress, Window, trainable, trained_by
from accelerate_ckpt._roots import Settings
from accelerate_ckpt._small_files import (
    SmallState,
    link_files,
    load_small,
    read_small,
    small_owners,
    verified_files,
    write_files,
)
from ckpt_core.commit import Catalog, verify
from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.groups import local_part
from ckpt_core.hosting import by_number
from ckpt_core.state import (
    Override,
    StateSource,
    Trained,
    TrainState,
    derive_rng,
    has_shards,
    load_item,
    load_rng_state,
    owner,
    rng_seed,
    rng_state,
    stable_tensors,
    template,
    under,
    unwrap_optimizer,
)
from ckpt_core.storage import Storage
from ckpt_core.types import CapturedState, SavedState

_logger = logger_of(__name__)

_SHARED = "accelerate"
_LOADERS = "dataloaders"
_RNG = "rng"
_CONFIGURED = ("mixed_precision", "gradient_accumulation_steps", "distributed_type")


def model_part(index: int) -> str:
    """Return the directory of a model's shards, as stock FSDP names it."""
    return f"pytorch_model_fsdp_{index}"


def optimizer_part(index: int) -> str:
    """Return the directory of an optimizer's shards, as stock FSDP names it."""
    return f"optimizer_{index}"


def _object_part(index: int) -> str:
    return f"custom_checkpoint_{index}"


def require_all(saved: SavedState, lacking: Sequence[tuple[str, ...]]) -> None:
    """Refuse a checkpoint that lacks the place of a model or an optimizer."""
    for part, _ in lacking:
        there = ", ".join(sorted(saved.sharded)) or "nothing"
        raise IncompatibleCheckpointError(
            f"checkpoint {saved.name} has no {part} (it has {there}); prepare as many models and optimizers, "
            "in the same order, as when it was saved",
            missing=(part,),
        )


@final
class AcceleratorState(StateSource):
    """Captures and loads one accelerator. Main thread only."""

    def __init__(
        self,
        accelerator: Accelerator,
        progress: Progress,
        *,
        coordinator: Coordinator,
        storage: Storage,
        settings: Settings,
    ) -> None:
        self._accelerator = accelerator
        self._progress = progress
        self._coordinator = coordinator
        self._storage = storage
        self._models_left: list[int] = []
        self._objects: dict[str, Any] = {}
        self._small = SmallState()
        self._put_for_hooks: Callable[[Path], None] | None = None
        self._generators: Mapping[str, Any] = {}
        self._seed = self._seed_of_first = torch.initial_seed()
        self._settings = settings
        self._window = Window(accelerator, gradients=settings.gradients)
        self.restored = ""

    def weights(self) -> StateSource:
        models = self._accelerator._models
        model = models[0] if len(models) == 1 else models
        return TrainState(model=model, contents=self._settings.contents).select({"model"})

    def _trained(self, models: Iterable[int]) -> Trained:
        accelerator, trained = self._accelerator, trainable(self._accelerator)
        return Trained(
            {(model_part(index), "model"): accelerator._models[index] for index in models},
            {
                (optimizer_part(index), "optimizer"): (owner(trained, each), each)
                for index, each in enumerate(accelerator._optimizers)
            },
            contents=self._settings.contents,
            check=require_all,
        )

    def capture(self) -> CapturedState:
        accelerator = self._accelerator
        # First: nothing below may draw random numbers any more.
        positions = self._progress.loaders.positions()
        objects = [each.state_dict() for each in accelerator._custom_objects]
        sharded_objects = {index for index, state in enumerate(objects) if has_shards(state)}
        with private_directory() as directory:
            left = self._write_files(directory, objects, sharded_objects)
            files = files_in(directory)
        self._settings.pickles.warn(files, small_owners(accelerator))
        trained = self._trained(left).capture()
        gradients, facts = self._window.capture()
        rng, optimizers = rng_state(), trained.optimizers
        return replace(
            trained,
            sharded={
                **trained.sharded,
                **gradients,
                **{_object_part(index): {"object": objects[index]} for index in sharded_objects},
            },
            per_rank={_LOADERS: positions, _RNG: rng},
            shared={_SHARED: {**self._shared(positions, rng), **facts}, **trained.shared},
            files=files,
            stable=stable_tensors(nn.ModuleList(trained_by(optimizers, accelerator._models)), optimizers),
            positions=positions_in_samples(positions),
            configuration=lambda: {name: getattr(accelerator, name, None) for name in _CONFIGURED},
        )

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        """Return what to load into; verify and read the small files on the way.

        So are the files that hooks will read.
        """
        accelerator = self._accelerator
        # Before anything puts generators back.
        self._seed = torch.initial_seed()
        self._seed_of_first = self._coordinator.run_on_coordinator(lambda: self._seed, what="comparing seeds")
        own = saved.shared.get(_SHARED, {})
        for kind, live in (("models", accelerator._models), ("optimizers", accelerator._optimizers)):
            if own.get(kind, len(live)) != len(live):
                raise IncompatibleCheckpointError(
                    f"checkpoint {saved.name} was saved with {own[kind]} {kind}, and {len(live)} are "
                    "prepared now: call accelerator.prepare() for the same objects before load_state()"
                )
        self._small = read_small(
            accelerator,
            self._storage,
            saved.name,
            self._settings.pickles,
            committed=saved.world_size is not None,
        )
        hooked = bool(accelerator._load_model_state_pre_hook)
        if hooked:
            self._put_for_hooks = self._files_for_hooks(saved)
        # A model that a hook took over at the save has no shards; then it is a hook that loads it.
        self._models_left = [
            index
            for index in range(len(accelerator._models))
            if not hooked or model_part(index) in saved.sharded
        ]
        self._target = self._trained(self._models_left)
        tree = self._target.target(saved)
        self._objects = {
            _object_part(index): each
            for index, each in enumerate(accelerator._custom_objects)
            if _object_part(index) in saved.sharded
        }
        for part, each in self._objects.items():
            tree[part] = {"object": template(each.state_dict(), under(saved.sharded[part], "object"))}
        elsewhere = set(map(id, self._objects.values()))
        left = [(each, state) for each, state in self._small.loads if id(each) not in elsewhere]
        self._small = self._small._replace(loads=left)
        return {**tree, **self._window.targets(saved, saved.shared.get(_SHARED, {}))}

    def begin(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Callable[[], None]:
        self._target.begin(loaded, saved)
        undo = load_small(self._accelerator, self._small)
        self._generators = rng_state()
        return undo

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        self._target.apply(loaded, saved, strict=saved.strict)
        for part, each in self._objects.items():
            load_item(
                f"the registered object in {saved.name}/{part}", each, loaded[part]["object"], of_tree=True
            )
        if self._accelerator._load_model_state_pre_hook:
            self._run_load_hooks(saved)
        self._window.put_back(loaded, saved.shared.get(_SHARED, {}))
        notes, self.restored = self._apply_own(saved), saved.name
        for note in notes:
            _logger.warning("%s", note)
        return notes

    def check_override(self, change: Override) -> None:
        change.check({name: each.param_groups for name, each in self._optimizers.items()})

    def override(self, change: Override) -> None:
        change.apply(self._optimizers, self._accelerator._schedulers)

    @property
    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return by_number(map(unwrap_optimizer, self._accelerator._optimizers))

    def _write_files(self, directory: Path, objects: Sequence[Any], sharded: Collection[int]) -> list[int]:
        """Let hooks and stock write their files; return the models that no hook took over."""
        accelerator, asked_for = self._accelerator, self._settings.stock_files
        replicas = accelerator.distributed_type != DistributedType.FSDP
        needed = replicas and (asked_for or accelerator._save_model_state_pre_hook)
        weights = [model.state_dict() for model in accelerator._models] if needed else []
        whole = replicas and not any(
            isinstance(each, DTensor) for state in weights for each in state.values()
        )
        left = run_save_hooks(accelerator, weights, directory, self._coordinator)
        single = asked_for and whole and accelerator.is_main_process
        each_node = accelerator.project_configuration.save_on_each_node
        save_accelerator_state(
            str(directory),
            weights if single else [],
            accelerator._optimizers if single else [],
            accelerator._schedulers,
            accelerator._dataloaders,
            accelerator.process_index,
            accelerator.step,
            accelerator.scaler,
            each_node,
            self._settings.safe,
        )
        for index, state in enumerate(objects):
            # In a file of stock there would be the first rank's shards alone.
            stand_in = SimpleNamespace(state_dict=lambda each={} if index in sharded else state: each)
            save_custom_state(stand_in, str(directory), index, each_node)
        return left

    def _shared(self, positions: Sequence[Mapping[str, Any]], rng: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state for ranks that were not among those that saved."""
        return {
            "step": self._accelerator.step,
            "optimizer_steps": self._progress.step,
            "rng_seed": rng_seed(rng),
            "rng": rng,
            "initial_seed": torch.initial_seed(),
            _LOADERS: [_without_own(position) for position in positions],
            "optimizers": len(self._accelerator._optimizers),
            "models": len(self._accelerator._models),
            "within_window": self._window.is_open,
        }

    def _files_for_hooks(self, saved: SavedState) -> Callable[[Path], None] | None:
        """Verify what hooks may read; return what puts it there, None if it is there."""

        def outside(path: str) -> bool:
            return path.partition("/")[0] not in saved.sharded

        local = local_part(self._storage)
        if saved.world_size is None:  # stock wrote it, without a manifest
            return None if local is not None else partial(write_files, {})
        if local is not None:
            manifest = Catalog(self._storage).manifest(saved.name)
            paths = [entry.path for entry in manifest.originals if outside(entry.path)]
            if not verify(self._storage, saved.name, paths=paths):
                return partial(link_files, paths, local.local_path(saved.name))
        return partial(write_files, verified_files(self._storage, saved.name, outside))

    def _run_load_hooks(self, saved: SavedState) -> None:
        accelerator = self._accelerator
        models = [] if accelerator.distributed_type == DistributedType.FSDP else accelerator._models
        local = local_part(self._storage)
        if self._put_for_hooks is None and local is not None:
            left = run_load_hooks(accelerator, models, local.local_path(saved.name))
        else:
            with private_directory() as directory:
                view = directory / saved.name
                view.mkdir()
                if self._put_for_hooks is not None:
                    self._put_for_hooks(view)
                left = run_load_hooks(accelerator, models, view)
        missing = sorted(set(left) - set(self._models_left))
        if missing:
            raise IncompatibleCheckpointError(
                f"checkpoint {saved.name} has no {model_part(missing[0])}: a save_state_pre_hook saved that "
                "model, and no load_state_pre_hook took it out of the list of models to load it"
            )

    def _apply_own(self, saved: SavedState) -> list[str]:
        accelerator, shared = self._accelerator, saved.shared.get(_SHARED, {})
        notes: list[str] = []
        if "step" in shared:
            # Ranks that were not there at the save have none of their own, and must synchronise like others.
            accelerator.step = shared["step"]
            self._progress.restore(shared["optimizer_steps"])
        notes += self._apply_rng(saved, shared)
        notes += self._window.notes(saved.name, shared)
        loaders = len(shared.get(_LOADERS, accelerator._dataloaders))
        if loaders != len(accelerator._dataloaders):
            notes.append(
                f"checkpoint {saved.name} was saved with {loaders} data loaders, and "
                f"{len(accelerator._dataloaders)} are prepared now: positions are put back in the order in "
                "which loaders were prepared"
            )
        same_ranks = saved.world_size == accelerator.num_processes and _LOADERS in saved.per_rank
        own = saved.per_rank[_LOADERS] if same_ranks else None
        return notes + self._progress.loaders.restore(shared.get(_LOADERS, []), own, rng_state())

    def _apply_rng(self, saved: SavedState, shared: Mapping[str, Any]) -> Sequence[str]:
        if _RNG in saved.per_rank:
            return load_rng_state(saved.per_rank[_RNG])
        if "rng_seed" not in shared:
            load_rng_state(self._generators)  # stock wrote it; loading may have drawn from them since
            return []
        rank = self._accelerator.process_index
        text = f"rank {rank} was not among the {saved.world_size} that saved: its random numbers are "
        if self._seed in {self._seed_of_first, shared.get("initial_seed")}:
            # Samplers that draw from the global generators need the same numbers on all ranks.
            return [text + "those of rank 0, as the script seeds both alike", *load_rng_state(shared["rng"])]
        derive_rng(shared["rng_seed"], rank)
        return [text + "derived from rank 0's"]


def _without_own(position: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out a stateful loader's own state, which is its rank's own."""
    kept = {name: each for name, each in position.get("loader", {}).items() if name != "own"}
    return {**position, "loader": kept} if position else {}
