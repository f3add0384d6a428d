"""A Trainer as a training state: collected by Lightning on the way out, handed back to it on the way in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch.distributed.tensor import DTensor

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.state import empty_like, model_state, model_target, optimizer_target, template, under
from ckpt_core.types import CapturedState, SavedEntries, SavedState
from lightning_ckpt._capture import (
    LARGE,
    LOADERS,
    MODEL,
    OPTIMIZER,
    PART,
    PREFETCHED,
    PREFIX,
    RNG,
    SEED,
    capture,
    unstorable,
)
from lightning_ckpt._hoist import plant

_LOAD_HOOK = "on_load_checkpoint"

_logger = logger_of(__name__)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint that was read, for Lightning to put back in its own order.

    Attributes:
        checkpoint: the dictionary that Lightning and its hooks expect.
        saved: what else the checkpoint said.
        prefetched: batches to train on before the loader's next.
        ended_epoch: whether it was saved when an epoch's last batch was done.
    """

    checkpoint: dict[str, Any]
    saved: SavedState
    prefetched: Sequence[Any]
    ended_epoch: bool

    @property
    def rng(self) -> Mapping[str, Any] | None:
        """This rank's random number generators, if it was among those that saved."""
        return cast("Mapping[str, Any] | None", self.saved.per_rank.get(RNG))

    @property
    def seed(self) -> int | None:
        """What to derive the generators of other ranks from."""
        return cast("int | None", self.saved.shared.get(SEED))


@final
class LightningState:
    """The state of a Trainer; a `StateSource`.

    Nothing of Lightning's is put back by `apply`: the strategy does that when Lightning asks, so that hooks
    see and may change everything first. Only the tensors are read into place, unless a hook may change them.

    Attributes:
        loaded: what was read.
        refusal: why nothing could be: the model or an optimizer is not of the checkpoint's kind.

    Args:
        trainer: the Trainer.
        checkpoint: what Lightning has collected already; collected on demand if None.
        loops: the state of Lightning's loops to resume with, if not the present one.
    """

    def __init__(
        self,
        trainer: Any,
        checkpoint: Mapping[str, Any] | None = None,
        *,
        loops: Mapping[str, Any] | None = None,
    ) -> None:
        self._trainer = trainer
        self._checkpoint = checkpoint
        self._loops = loops
        self.loaded: Loaded | None = None
        self.refusal: IncompatibleCheckpointError | None = None

    def capture(self) -> CapturedState:
        """The state as it is now, with live tensors."""
        return capture(self._trainer, self._collected())

    def unstorable(self) -> list[str]:
        """What to say of callbacks and hooks whose state cannot be stored."""
        return unstorable(self._collected())

    def _collected(self) -> Mapping[str, Any]:
        checkpoint = self._checkpoint
        if checkpoint is None:
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if self._loops is not None:
            checkpoint = {**checkpoint, "loops": self._loops}
        return cast("Mapping[str, Any]", checkpoint)

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        """What to load into; see `StateSource`.

        Raises:
            IncompatibleCheckpointError: the checkpoint is of another model or of other optimizers.
        """
        try:
            return self._target(saved)
        except IncompatibleCheckpointError as error:
            self.refusal = error
            raise

    def _target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        entries = saved.sharded.get(PART, {})
        tree: dict[str, Any] = {MODEL: self._model_target(under(entries, MODEL))}
        if large := under(entries, LARGE):
            tree[LARGE] = template(self._shards(large), large)
        optimizers = under(entries, OPTIMIZER)
        if optimizers and self._trainer.state.fn == "fit":
            tree[OPTIMIZER] = self._optimizer_target(optimizers)
        return {PART: tree}

    def _model_target(self, saved: SavedEntries) -> dict[str, Any]:
        strategy, module = self._trainer.strategy, self._trainer.lightning_module
        if _changes_on_load(module):
            live = model_state(strategy.model)
            # Its own memory: the hook may drop or change what must not have reached the model by then.
            return template({name: _unlike(value) for name, value in live.items()}, saved)
        if module.strict_loading:
            return model_target(strategy.model, saved)
        live = model_state(strategy.model)
        wanted = {path: entry for path, entry in saved.items() if path[0] in live}
        return template(live, wanted)

    def _shards(self, large: SavedEntries) -> dict[str, Any]:
        """Memory for what averaging callbacks keep of sharded weights: Lightning puts it into such ones."""
        live = model_state(self._trainer.strategy.model)
        names = {path[0]: str(path[0]).rpartition("/")[2] for path in large}
        found = {str(path): live.get(name) for path, name in names.items()}
        return {path: _unlike(value) for path, value in found.items() if isinstance(value, DTensor)}

    def _optimizer_target(self, saved: SavedEntries) -> dict[str, Any]:
        strategy = self._trainer.strategy
        several = _indices(saved)
        if len(several or [0]) != len(strategy.optimizers):
            raise IncompatibleCheckpointError(
                f"the checkpoint holds {len(several or [0])} optimizer(s), configure_optimizers() made "
                f"{len(strategy.optimizers)}; make as many, in the same order"
            )
        if not several:
            return optimizer_target(strategy.model, strategy.optimizers[0], saved)
        return {
            index: optimizer_target(strategy.model, optimizer, under(saved, index))
            for index, optimizer in zip(several, strategy.optimizers, strict=True)
        }

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        """Note what was read; returns what a person should know."""
        tree = loaded[PART]
        checkpoint = plain_items(saved, tree.get(LARGE, {}))
        checkpoint["state_dict"] = dict(tree[MODEL])
        if OPTIMIZER in tree:
            checkpoint["optimizer_states"] = _as_list(tree[OPTIMIZER])
        ended_epoch = _ended_epoch(checkpoint)
        fits = saved.world_size in {None, self._trainer.world_size}
        mid_epoch = fits and not ended_epoch
        if mid_epoch and LOADERS in saved.per_rank:
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = saved.per_rank[LOADERS]
        self.loaded = Loaded(
            checkpoint=checkpoint,
            saved=saved,
            prefetched=saved.per_rank.get(PREFETCHED, ()) if mid_epoch else (),
            ended_epoch=ended_epoch,
        )
        return self._tell(fits=fits)

    def _tell(self, *, fits: bool) -> Sequence[str]:
        saved = cast("Loaded", self.loaded).saved
        if fits:
            return ()
        note = (
            f"{saved.name} was saved by {saved.world_size} ranks and there are {self._trainer.world_size} "
            "now: the position in the data is not resumed, so some samples of this epoch will be seen twice "
            "or not at all, and random numbers go on as far as ranks correspond"
        )
        if self._trainer.is_global_zero:
            _logger.warning("%s", note)
        return (note,)


def _changes_on_load(module: Any) -> bool:
    stock = next(cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule")
    return getattr(type(module), _LOAD_HOOK) is not getattr(stock, _LOAD_HOOK)


def _unlike(value: Any) -> Any:
    """Memory of the same kind, so that nothing is read into the live tensor."""
    return empty_like(value, value.dtype) if isinstance(value, torch.Tensor) else value


def _indices(saved: SavedEntries) -> list[str]:
    """The names of several optimizers, in order; none if there is one, stored without a name."""
    first = {str(path[0]) for path in saved}
    return sorted(first, key=int) if all(name.isdecimal() for name in first) else []


def _as_list(optimizers: Mapping[str, Any]) -> list[Any]:
    if all(name.isdecimal() for name in optimizers):
        return [optimizers[name] for name in sorted(optimizers, key=int)]
    return [optimizers]


def plain_items(saved: SavedState, large: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Lightning's keys; the least that it asks for, if the checkpoint was not saved by Lightning."""
    items = {**saved.shared, **saved.per_rank}
    own = {
        key.removeprefix(PREFIX): plant(value, large)
        for key, value in items.items()
        if key.startswith(PREFIX) and key not in {LOADERS, PREFETCHED}
    }
    version = {"pytorch-lightning_version": "2.5.0"}
    return {**version, "epoch": 0, "global_step": saved.step or 0, "lr_schedulers": [], **own}


def _ended_epoch(checkpoint: Mapping[str, Any]) -> bool:
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    return bool(fit_loop.get("epoch_loop.batch_progress", {}).get("is_last_batch", False))
