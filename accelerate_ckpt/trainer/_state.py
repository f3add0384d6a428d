"""The training state of a Trainer, in the layout that the Trainer itself reads.

The Trainer's own `_save_checkpoint` runs into a directory of this rank alone; what it writes there (config,
tokenizer, scheduler, random states, `trainer_state.json`) becomes files of the checkpoint. Model and
optimizer go through the core. The weights of a model that is not sharded are once in a checkpoint: where the
Trainer writes `model.safetensors`, what that holds is in no shard, and is read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from safetensors import safe_open
from safetensors.torch import load
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from accelerate_ckpt._host_calls import files_in, private_directory
from accelerate_ckpt._roots import Settings
from accelerate_ckpt._state import model_part, optimizer_part, require_all
from accelerate_ckpt.trainer._callbacks import CallbackStates, ToCome
from accelerate_ckpt.trainer._data import DataProgress, progress_file
from ckpt_core._torch_internals import same_bytes
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.hosting import replaced
from ckpt_core.names import IN_FILES
from ckpt_core.state import (
    Contents,
    Override,
    StateSource,
    Trained,
    saves_base,
    stable_tensors,
    unwrap_optimizer,
)
from ckpt_core.types import CapturedState, SavedState

# The stock Trainer takes any `pytorch_model_fsdp…` directory as a sign of FSDP and refuses without it.
_PLAIN_MODEL_PART = "model_0"
_TO_COME = "to_come"
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
    ) -> None:
        self.to_come = ToCome()
        self._trainer: Any = trainer  # its own annotations allow None where there is none while it trains
        self._stock = stock
        self._progress = progress
        self._pickles = settings.pickles
        self._contents: Contents | None = settings.contents
        self._given = given = settings.stock_files
        adapts = has_adapters(trainer.model) and not saves_base(self._trainer.model_wrapped, self._contents)
        # Adapters have a file of their own.
        self.stock_files = not adapts if given is None else given
        self._with_optimizer = with_optimizer and not trainer.args.save_only_model
        self.change: Override | None = None

    def check_override(self, change: Override) -> None:
        change.check({"": self._trainer.optimizer.param_groups})

    def override(self, change: Override) -> None:
        """Note what to change once the scheduler is loaded, too."""
        self.change = change

    def apply_change(self) -> None:
        """Change hyperparameters, and the schedule of the learning rate."""
        if self.change is not None:
            self.change.apply({"": unwrap_optimizer(self._trainer.optimizer)}, [self._trainer.lr_scheduler])

    def capture(self) -> CapturedState:
        trainer = self._trainer
        callbacks = CallbackStates(trainer)
        callbacks.check()
        files, weights = self._files()
        part = model_part(0) if trainer.is_fsdp_enabled else _PLAIN_MODEL_PART
        trained = self._trained(part, with_optimizer=self._with_optimizer).capture()
        state, places = trained.sharded[part]["model"], dict[str, tuple[str, str]]()
        written = self.stock_files or has_adapters(_inner(trainer))
        if has_places := written and weights is None:
            buffers = {key.removeprefix("model.") for _, key in trained.local}
            places = self._places(files, {name: each for name, each in state.items() if name not in buffers})
        left = {name: value for name, value in state.items() if name not in places}
        optimizers = [unwrap_optimizer(trainer.optimizer)]
        extra = CapturedState() if trainer.args.save_only_model else callbacks.capture()
        own = {IN_FILES: places} if has_places else {}
        return replace(
            trained,
            sharded={**trained.sharded, part: {"model": left}, **extra.sharded},
            shared={**extra.shared, **trained.shared, **own, _TO_COME: asdict(self.to_come)},
            files=files,
            in_files={name: state[name] for name in places},
            stable=stable_tensors(trainer.model_wrapped, optimizers),
            optimizers=optimizers,
            positions={} if self._progress is None else {"training": self._progress.in_samples()},
            configuration=lambda: {k: v for k, v in trainer.args.to_dict().items() if k not in _PLACES},
        )

    def _trained(self, part: str, *, with_optimizer: bool) -> Trained:
        model, optimizer = self._trainer.model_wrapped, self._trainer.optimizer
        return Trained(
            {(part, "model"): model},
            {(optimizer_part(0), "optimizer"): (model, optimizer)} if with_optimizer else {},
            contents=self._contents,
            check=require_all,
        )

    def _places(self, files: Mapping[str, bytes], state: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return where files hold exactly the parameters of `state`, under whatever name.

        What a file leaves out because it is tied to another tensor has the place of that one. The files are
        on one rank, which keeps what they lack for all: replicas are equal. Buffers may differ between them,
        and stay with their ranks.
        """
        trainer = self._trainer
        tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
        if not trainer.args.should_save:
            return dict.fromkeys(tensors, ("", ""))
        contents = {path: load(content) for path, content in files.items() if path.endswith(".safetensors")}
        found: dict[str, tuple[str, str]] = {}
        tied: dict[tuple[int, torch.Size], tuple[str, str]] = {}
        adapters = {"modules_to_save", *getattr(_inner(trainer), "peft_config", {})}
        for name, value in tensors.items():
            # Files of one module hold its own names, without those of what it is in; PEFT's, of no adapter.
            plain = ".".join(each for each in name.split(".") if each not in adapters)
            shorter = [plain.split(".", start)[-1] for start in range(plain.count(".") + 1)]
            for file, key in ((file, key) for file in contents for key in shorter if key in contents[file]):
                if name not in found and same_bytes(value, contents[file][key]):
                    found[name] = tied[value.data_ptr(), value.shape] = file, key
        for name in tensors.keys() - found.keys():
            if place := tied.get((tensors[name].data_ptr(), tensors[name].shape)):
                found[name] = place
        return found

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        self.to_come = ToCome(**saved.shared.get(_TO_COME, {}))
        with_optimizer = self._with_optimizer and optimizer_part(0) in saved.sharded
        part = next((each for each in (model_part(0), _PLAIN_MODEL_PART) if each in saved.sharded), None)
        if part is None:
            raise IncompatibleCheckpointError(
                f"checkpoint {saved.name} holds no model: it was not saved by enable_trainer()"
            )
        self._target = self._trained(part, with_optimizer=with_optimizer)
        return self._target.target(saved)

    def begin(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Callable[[], None]:
        self._target.begin(loaded, saved)
        return lambda: None

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        """Load model and optimizer; the Trainer's own methods read the rest."""
        self._target.apply(loaded, saved)
        return []

    def _files(self) -> tuple[dict[str, bytes], Mapping[str, Any] | None]:
        """Return what the Trainer writes, single files for its own loader included.

        Also the gathered weights, of a sharded model.
        """
        trainer = self._trainer
        # What ranks do together comes first: a rank that fails later keeps no other one waiting.
        trainer.store_flos()
        weights = weights_for_files(trainer, stock_files=self.stock_files)
        with private_directory() as directory:
            with self._writing_to(directory, weights):
                self._stock._save_checkpoint(trainer.model, None)
            folder = directory / f"checkpoint-{trainer.state.global_step}"
            if trainer.args.should_save:
                trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
            for path in folder.rglob("*.safetensors"):
                with safe_open(path, framework="pt") as inside:
                    is_empty = not inside.keys()
                if is_empty:  # it would load as an untrained model
                    path.unlink()
            files = files_in(folder)
        if self._progress is not None and not trainer.args.save_only_model:
            files[progress_file(trainer.args.process_index)] = self._progress.written()
        self._pickles.warn(files, {SCHEDULER_NAME: f"the scheduler, a {type(trainer.lr_scheduler).__name__}"})
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
            config = getattr(trainer.model, "config", None)
            # They are gathered already: the model would wait for ranks that do not come.
            divided = getattr(config, "distributed_config", None) is not None
            with replaced(config, distributed_config=None) if divided else nullcontext():
                trainer._save(output_dir, state_dict=dict(weights))
        if weights is None or type(trainer).save_model is not Trainer.save_model:
            self._stock.save_model(output_dir, _internal_call=True)

    def _save_optimizer_and_scheduler(self, weights: Mapping[str, Any] | None, output_dir: str) -> None:
        trainer = self._trainer
        if not trainer.args.should_save:
            return
        if self._given and weights is None:
            torch.save(trainer.optimizer.state_dict(), Path(output_dir) / OPTIMIZER_NAME)
        torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)


def has_adapters(model: Any) -> bool:
    """Return whether PEFT has changed the model, so that only adapters are written."""
    return hasattr(model, "peft_config") or bool(getattr(model, "_hf_peft_config_loaded", False))


def _gathered_adapters(model: torch.nn.Module) -> Mapping[str, Any]:
    """Gather what is trained, or belongs to an adapter by its name. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        # Its state dict holds shards of another kind, which only torch itself can put together.
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        return get_model_state_dict(model, options=whole)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapters = set(getattr(model, "peft_config", {}))
    return {
        name: value.full_tensor().cpu() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
        if name in trained or adapters & set(name.split("."))
    }


def _inner(trainer: Any) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)


def weights_for_files(trainer: Any, *, stock_files: bool) -> Mapping[str, Any] | None:
    """Return the weights that the Trainer is to write beside our shards.

    Collective if the model is sharded.

    Returns:
        What to write: None for what the Trainer would write by itself, and nothing if it is empty. Adapters
        are written always: they are small, and `PeftModel.from_pretrained` reads nothing else.
    """
    model = _inner(trainer)
    gathers = getattr(trainer, "is_distributed_loading_by_transformers", False)
    if gathers or trainer.is_fsdp_enabled or any(isinstance(each, DTensor) for each in model.parameters()):
        if has_adapters(model):
            return _gathered_adapters(trainer.model)
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
