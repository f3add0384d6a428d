"""The training state of a Trainer, in the layout that the Trainer itself reads.

The Trainer's own `_save_checkpoint` runs into a directory of this rank alone; what it writes there (config,
tokenizer, scheduler, random states, `trainer_state.json`) becomes files of the checkpoint. Model and
optimizer go through the core.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from accelerate_ckpt._host_calls import files_in, private_directory
from accelerate_ckpt._roots import Settings
from accelerate_ckpt._small_files import verified_files
from accelerate_ckpt._state import inner_entries, model_part, optimizer_part
from accelerate_ckpt.trainer._adapters import (
    ADAPTERS,
    Places,
    gathered_adapters,
    has_adapters,
    loaded_adapters,
    places_in,
    places_of,
    written_places,
)
from accelerate_ckpt.trainer._callbacks import CallbackStates, ToCome
from accelerate_ckpt.trainer._data import DataProgress, progress_file
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.hosting import replaced
from ckpt_core.state import (
    Contents,
    Override,
    StateSource,
    check_groups,
    load_model_state,
    load_optimizer_state,
    local_buffers,
    model_state,
    model_target,
    optimizer_state,
    optimizer_target,
    saved_part,
    saves_base,
    stable_tensors,
    supplied,
    unwrap_optimizer,
)
from ckpt_core.storage import Storage
from ckpt_core.types import CapturedState, SavedState

# The stock Trainer takes any `pytorch_model_fsdp…` directory as a sign of FSDP and refuses without it.
_PLAIN_MODEL_PART = "model_0"
_MODEL = "model"
_TOKENS = ("hub_token", "push_to_hub_token")
_PLACES = frozenset({"output_dir", "logging_dir", "run_name", "local_rank", "resume_from_checkpoint"})
"""Arguments that say where a training runs, not how."""


@final
class TrainingState(StateSource):
    """Captures and loads one Trainer. Main thread only."""

    def __init__(
        self,
        trainer: Trainer,
        stock: SimpleNamespace,
        settings: Settings,
        *,
        with_optimizer: bool = True,
        progress: DataProgress | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.to_come = ToCome()
        self._trainer: Any = trainer  # its own annotations allow None where there is none while it trains
        self._stock = stock
        self._progress = progress
        self._pickles = settings.pickles
        self._contents: Contents | None = settings.contents
        self._twice = settings.stock_files is True
        given = settings.stock_files
        self._stock_files = stock_files_wanted(trainer, self._contents) if given is None else given
        self._storage = storage
        self._adapters: dict[str, Any] = {}
        self._base: frozenset[str] = frozenset()
        self._with_optimizer = with_optimizer and not trainer.args.save_only_model
        self.change: Override | None = None

    def check_override(self, change: Override) -> None:
        """Refuse hyperparameters that the optimizer lacks."""
        change.check({"": self._trainer.optimizer.param_groups})

    def override(self, change: Override) -> None:
        """Note what to change once the scheduler is loaded, too."""
        self.change = change

    def apply_change(self) -> None:
        """Change hyperparameters, and the schedule of the learning rate."""
        if self.change is not None:
            optimizer = unwrap_optimizer(self._trainer.optimizer)
            self.change.apply({"": optimizer}, [self._trainer.lr_scheduler])

    def capture(self) -> CapturedState:
        """Capture the state as it is now, with live tensors."""
        trainer, model = self._trainer, self._trainer.model_wrapped
        callbacks = CallbackStates(trainer)
        callbacks.check()
        files, weights = self._files()
        part = model_part(0) if trainer.is_fsdp_enabled else _PLAIN_MODEL_PART
        state, items = saved_part(model, model_state(model), self._contents, place=_MODEL)
        whole = state
        if not self._twice and (items or (self._stock_files and weights is None)):
            state, places = self._without_adapters(state, weights, files)
            items |= {ADAPTERS: places}
        sharded: dict[str, dict[str, Any]] = {part: {"model": state}}
        if self._with_optimizer:
            sharded[optimizer_part(0)] = {"optimizer": optimizer_state(model, trainer.optimizer)}
        optimizers = [unwrap_optimizer(trainer.optimizer)]
        extra = CapturedState() if trainer.args.save_only_model else callbacks.capture()
        return CapturedState(
            sharded={**sharded, **extra.sharded},
            shared={**extra.shared, **items, **self.to_come.item()},
            files=files,
            in_files={name: whole[name] for name in whole.keys() - state.keys()},
            local=local_buffers(model, state, part=part),
            stable=stable_tensors(model, optimizers),
            optimizers=optimizers,
            positions={} if self._progress is None else {"training": self._progress.in_samples()},
            configuration=lambda: _configured(trainer.args),
        )

    def _without_adapters(
        self, state: Mapping[str, Any], weights: Mapping[str, Any] | None, files: Mapping[str, bytes]
    ) -> tuple[dict[str, Any], Places]:
        """Leave out what the files of others hold; return the rest, and their places.

        The files are on one rank, which keeps what they lack for all: replicas are equal.
        """
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        adapts = has_adapters(model)
        # Buffers may differ between replicas, and stay with their ranks.
        buffers = {name for _, name in local_buffers(trainer.model_wrapped, state, prefix="")}
        parameters = {
            name: value
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name not in buffers
        }
        places = places_of(model, state) if adapts else dict.fromkeys(parameters, ("", ""))
        if trainer.args.should_save:
            whole = weights or state
            found = written_places(places, files, whole) if adapts else places_in(files, parameters)
            if len(found) < len(places) and weights:
                name = next(name for name in places if name not in found)
                raise ConfigError(
                    f"the Trainer has not written the adapters as they are, first {name}: save_model() or "
                    "save_pretrained() changes them. Give enable_trainer() stock_files=True, which saves "
                    "their shards as well"
                )
            places = found
        return {name: value for name, value in state.items() if name not in places}, places

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        """Return what to load into."""
        trainer, part, self.to_come = self._trainer, _model_part_of(saved), ToCome.of(saved)
        model = trainer.model_wrapped
        tree: dict[str, dict[str, Any]] = {}
        base = supplied(model, saved, self._contents, place=_MODEL)
        self._adapters = loaded_adapters(
            saved, model_state(model), partial(self._verified, saved.name), whole=not base
        )
        self._base = base | self._adapters.keys()
        entries = inner_entries(saved, part, "model", may_lack=bool(self._base))
        tree[part] = {"model": model_target(model, entries, base=self._base)}
        if self._with_optimizer and optimizer_part(0) in saved.sharded:
            entries = inner_entries(saved, optimizer_part(0), "optimizer")
            tree[optimizer_part(0)] = {
                "optimizer": optimizer_target(trainer.model_wrapped, trainer.optimizer, entries)
            }
        return tree

    def begin(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Callable[[], None]:
        """Check that the optimizer has the same parameters."""
        del saved
        if optimizer_part(0) in loaded:
            trainer = self._trainer
            check_groups(trainer.model_wrapped, trainer.optimizer, loaded[optimizer_part(0)]["optimizer"])
        return lambda: None

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        """Load model and optimizer; the Trainer's own methods read the rest."""
        trainer = self._trainer
        if optimizer_part(0) in loaded:
            optimizer = loaded[optimizer_part(0)]["optimizer"]
            load_optimizer_state(trainer.model_wrapped, trainer.optimizer, optimizer)
        state = {**loaded[_model_part_of(saved)]["model"], **self._adapters}
        load_model_state(trainer.model_wrapped, state, base=self._base)
        self._adapters = {}
        return []

    def _verified(self, name: str, paths: Collection[str]) -> Mapping[str, bytes]:
        if self._storage is None:
            raise ConfigError("adapters are read from the storage of a checkpoint, and none was given")
        return verified_files(self._storage, name, lambda path: path in paths)

    def _files(self) -> tuple[dict[str, bytes], Mapping[str, Any] | None]:
        """Return what the Trainer writes, single files for its own loader included.

        Also the gathered weights, of a sharded model.
        """
        trainer = self._trainer
        # What ranks do together comes first: a rank that fails later keeps no other one waiting.
        trainer.store_flos()
        weights = weights_for_files(trainer, stock_files=self._stock_files)
        with private_directory() as directory:
            with self._writing_to(directory, weights):
                self._stock._save_checkpoint(trainer.model, None)
            folder = directory / f"checkpoint-{trainer.state.global_step}"
            if trainer.args.should_save:
                trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
            remove_empty_weights(folder)
            files = files_in(folder)
        if self._progress is not None and not trainer.args.save_only_model:
            files[progress_file(trainer.args.process_index)] = self._progress.written()
        kind = type(trainer.lr_scheduler).__name__
        self._pickles.warn(files, {SCHEDULER_NAME: f"the scheduler, a {kind}"})
        return files, weights

    @contextmanager
    def _writing_to(self, directory: Path, weights: Mapping[str, Any] | None) -> Generator[None]:
        """Redirect the Trainer's output, and leave large things and other ranks to us."""
        trainer, args = self._trainer, self._trainer.args
        tokens = [name for name in _TOKENS if getattr(args, name, None) is not None]
        with (
            replaced(
                trainer,
                _get_output_dir=lambda trial: str(directory),  # noqa: ARG005 - the Trainer's own signature
                save_model=partial(self._save_model, weights),
                _save_optimizer_and_scheduler=partial(self._save_optimizer_and_scheduler, weights),
                store_flos=lambda: None,
            ),
            # With a best step, the Trainer waits for all ranks, and looks for it in the directory it writes.
            replaced(trainer.state, best_global_step=None),
            # They are pickled into `training_args.bin`, and go wherever the checkpoint is copied.
            replaced(args, **dict.fromkeys(tokens)),
        ):
            yield

    def _save_model(
        self,
        weights: Mapping[str, Any] | None,
        output_dir: str,
        _internal_call: bool = False,  # noqa: FBT001, FBT002 - the Trainer's own signature
    ) -> None:
        trainer = self._trainer
        if weights is not None and trainer.args.should_save:
            with gathered_already(trainer.model):
                trainer._save(output_dir, state_dict=dict(weights))
        if weights is None or type(trainer).save_model is not Trainer.save_model:
            self._stock.save_model(output_dir, _internal_call=True)

    def _save_optimizer_and_scheduler(self, weights: Mapping[str, Any] | None, output_dir: str) -> None:
        trainer = self._trainer
        if not trainer.args.should_save:
            return
        if self._twice and weights is None:
            torch.save(trainer.optimizer.state_dict(), Path(output_dir) / OPTIMIZER_NAME)
        torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)


def _model_part_of(saved: SavedState) -> str:
    for part in (model_part(0), _PLAIN_MODEL_PART):
        if part in saved.sharded:
            return part
    if ADAPTERS in saved.shared:
        return _PLAIN_MODEL_PART
    raise IncompatibleCheckpointError(
        f"checkpoint {saved.name} holds no model: it was not saved by enable_trainer()"
    )


def stock_files_wanted(trainer: Any, contents: Contents | None) -> bool:
    """Return whether the weights are by default in a file for `from_pretrained`.

    Not with adapters, which have their own.
    """
    return saves_base(trainer.model_wrapped, contents) or not has_adapters(trainer.model)


def weights_for_files(trainer: Any, *, stock_files: bool) -> Mapping[str, Any] | None:
    """Return the weights that the Trainer is to write beside our shards.

    Collective if the model is sharded.

    Returns:
        What to write: None for what the Trainer would write by itself, and nothing if it is empty. Adapters
        are written always: they are small, and `PeftModel.from_pretrained` reads nothing else.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    gathers = getattr(trainer, "is_distributed_loading_by_transformers", False)
    if gathers or trainer.is_fsdp_enabled or any(isinstance(each, DTensor) for each in model.parameters()):
        if has_adapters(model):
            return gathered_adapters(trainer.model)
        if trainer.is_fsdp_enabled or not (gathers and stock_files):
            return {}
        gathered: Mapping[str, Any] = model.gather_sharded_state_dict_for_save(
            model,
            model.state_dict(),
            model.config.distributed_config,
            save_on_this_rank=trainer.args.should_save,
        )
        return gathered
    return None if stock_files or has_adapters(model) else {}


@contextmanager
def gathered_already(model: Any) -> Generator[None]:
    """Let one rank alone save the model, which would wait for the others."""
    config = getattr(model, "config", None)
    distributed = getattr(config, "distributed_config", None)
    with nullcontext() if distributed is None else replaced(config, distributed_config=None):
        yield


def remove_empty_weights(folder: Path) -> None:
    """Remove weight files without weights: they load as an untrained model."""
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            names = weights.keys()
        if not names:
            path.unlink()


def _configured(args: Any) -> dict[str, Any]:
    return {name: value for name, value in args.to_dict().items() if name not in _PLACES}
