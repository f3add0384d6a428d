"""The training state of a Trainer: captured from Lightning, and handed back."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast, final

import torch
from torch.distributed.tensor import DTensor

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ALLOW_PICKLE, ConfigError, IncompatibleCheckpointError
from ckpt_core.state import (
    Contents,
    Gradients,
    NotEncodableError,
    Override,
    check_groups,
    empty_like,
    encode,
    function_free,
    local_buffers,
    model_state,
    model_target,
    optimizer_target,
    rng_seed,
    rng_state,
    saved_part,
    stable_tensors,
    supplied,
    template,
    under,
)
from ckpt_core.types import CapturedState, SavedEntries, SavedState
from lightning_ckpt.loops import (
    POSITIONS,
    PREFETCHED,
    Fit,
    configuration_of,
    positions,
    positions_in_samples,
    tell_of_hidden,
)

PART = ""
MODEL = "model"
OPTIMIZER = "optimizer"
GRADIENTS = "gradients"
"""Item of gradients that wait for an optimizer step, and of what a load must know of them."""
LARGE = "lightning"
"""Item of the large tensors that callbacks and hooks put into the dictionary."""

PREFIX = "lightning."
"""In front of the dictionary's own keys, so that none is taken for an item of the core."""

TRAINING = "lightning.training"
_CORES = {"state_dict", "optimizer_states", "callbacks"}
RNG = "rng"
SEED = "rng_seed"

_logger = logger_of(__name__)
_LOAD_HOOK = "on_load_checkpoint"
_MARK = "$tensor"
_SMALL_BYTES = 1 << 16
_T = TypeVar("_T")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint that was read, for Lightning to load in its own order.

    Attributes:
        checkpoint: the dictionary that Lightning and its hooks expect.
        prefetched: batches to train on before the loader's next.
        positions: in the loaders; empty in checkpoints of others.
        ended_epoch: whether it was saved when an epoch's last batch was done.
        training: what `Fit` saved; None of saves outside a training.
        base: names of weights that are not in it, because the model has them.
        gradients: those of an open accumulation window; None of a save between windows.
    """

    checkpoint: dict[str, Any]
    saved: SavedState
    prefetched: Sequence[Any]
    positions: Mapping[str, Any]
    ended_epoch: bool
    training: Mapping[str, Any] | None
    base: frozenset[str] = frozenset()
    gradients: Mapping[str, Any] | None = None

    @property
    def rng(self) -> Mapping[str, Any] | None:
        return cast("Mapping[str, Any] | None", self.saved.per_rank.get(RNG))

    @property
    def seed(self) -> int | None:
        """The seed to derive the generators of other ranks from."""
        return cast("int | None", self.saved.shared.get(SEED))


@final
class LightningState:
    """The state of a Trainer; a `StateSource`.

    `apply` loads nothing into Lightning: the strategy does, when Lightning calls it, so that hooks see and
    may change everything first. Only tensors are read into place, unless a hook may change them.

    Attributes:
        refusal: why nothing could be: the model or an optimizer is not of the checkpoint's kind.
        change: hyperparameters to change, once optimizers and schedulers are loaded; None for no change.

    Args:
        checkpoint: what Lightning has collected already; collected on demand if None.
        fit: what it changes besides; None outside a fit.
        has_optimizers: whether the strategy has its optimizers, to load into.
    """

    def __init__(
        self,
        trainer: Any,
        checkpoint: Mapping[str, Any] | None = None,
        *,
        fit: Fit | None = None,
        has_optimizers: bool = True,
        contents: Contents | None = None,
    ) -> None:
        self._trainer = trainer
        self._checkpoint = checkpoint
        self._fit = fit
        self._has_optimizers = has_optimizers
        self._contents: Contents | None = contents
        self._base = frozenset[str]()
        self.loaded: LoadedCheckpoint | None = None
        self.refusal: IncompatibleCheckpointError | None = None
        self.change: Override | None = None
        self._wanted = Override()

    def check_override(self, change: Override) -> None:
        self._wanted = change

    def override(self, change: Override) -> None:
        self.change = change

    def capture(self) -> CapturedState:
        return capture(self._trainer, self._collected(), self._fit, self._contents)

    def unstorable(self) -> list[str]:
        """Return advice on callbacks and hooks whose state cannot be stored."""
        return unstorable(self._collected())

    def _collected(self) -> Mapping[str, Any]:
        checkpoint = self._checkpoint
        if checkpoint is None:
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        return cast("Mapping[str, Any]", checkpoint)

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        try:
            return self._target(saved)
        except IncompatibleCheckpointError as error:
            self.refusal = error
            raise

    def _target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        entries = saved.sharded.get(PART, {})
        strict = saved.strict and self._trainer.lightning_module.strict_loading
        model = self._trainer.strategy.model
        self._base = supplied(model, replace(saved, strict=strict), self._contents, place=MODEL)
        tree: dict[str, Any] = {MODEL: self._model_target(under(entries, MODEL))}
        if large := under(entries, LARGE):
            tree[LARGE] = template(self._shards(large), large)
        optimizers = under(entries, OPTIMIZER)
        if optimizers and self._trainer.state.fn == "fit":
            tree[OPTIMIZER] = self._optimizer_target(optimizers)
        if GRADIENTS in saved.shared and self._trainer.state.fn == "fit":
            tree[GRADIENTS] = self._gradients_target(under(entries, GRADIENTS), saved)
        return {PART: tree}

    def _gradients_target(self, entries: SavedEntries, saved: SavedState) -> dict[str, Any]:
        """Return memory for gradients; none if ranks that are gone had their own."""
        strategy = self._trainer.strategy
        optimizers = strategy.optimizers if self._has_optimizers else ()
        try:
            gradients = Gradients(model=strategy.model, optimizers=optimizers)
            return gradients.target(entries, saved.shared[GRADIENTS])
        except IncompatibleCheckpointError as error:
            _logger.warning("the gradients of %s are left out: %s", saved.name, error)
            return {}

    def _model_target(self, saved: SavedEntries) -> dict[str, Any]:
        strategy, module = self._trainer.strategy, self._trainer.lightning_module
        if _changes_on_load(module):
            live = model_state(strategy.model)
            # Its own memory: the hook may drop or change what must not have reached the model by then.
            return template({name: _unlike(value) for name, value in live.items()}, saved)
        if module.strict_loading:
            return model_target(strategy.model, saved, base=self._base)
        live = model_state(strategy.model)
        wanted = {path: entry for path, entry in saved.items() if path[0] in live}
        return template(live, wanted)

    def _shards(self, large: SavedEntries) -> dict[str, Any]:
        """Allocate shards for what averaging callbacks keep of sharded weights."""
        live = model_state(self._trainer.strategy.model)
        names = {path[0]: str(path[0]).rpartition("/")[2] for path in large}
        found = {str(path): live.get(name) for path, name in names.items()}
        return {path: _unlike(value) for path, value in found.items() if isinstance(value, DTensor)}

    def _optimizer_target(self, saved: SavedEntries) -> dict[str, Any]:
        strategy = self._trainer.strategy
        if not self._has_optimizers:
            return template({}, saved)
        several = _indices(saved)
        _check_number(strategy, len(several or [0]))
        if not several:
            return optimizer_target(strategy.model, strategy.optimizers[0], saved)
        return {
            index: optimizer_target(strategy.model, optimizer, under(saved, index))
            for index, optimizer in zip(several, strategy.optimizers, strict=True)
        }

    def begin(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Callable[[], None]:
        del saved
        tree = loaded[PART]
        states = _as_list(tree.get(OPTIMIZER, {"param_groups": []}))
        self._wanted.check(by_number(state["param_groups"] for state in states))
        if OPTIMIZER in tree and self._has_optimizers:
            try:
                check_optimizers(self._trainer.strategy, _as_list(tree[OPTIMIZER]))
            except IncompatibleCheckpointError as error:
                self.refusal = error
                raise
        return lambda: None

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        tree = loaded[PART]
        checkpoint = plain_items(saved, tree.get(LARGE, {}))
        checkpoint["state_dict"] = dict(tree[MODEL])
        if OPTIMIZER in tree:
            checkpoint["optimizer_states"] = _as_list(tree[OPTIMIZER])
        ended_epoch = _ended_epoch(checkpoint)
        fits = saved.world_size in {None, self._trainer.world_size}
        mid_epoch = fits and not ended_epoch
        self.loaded = LoadedCheckpoint(
            checkpoint=checkpoint,
            saved=saved,
            prefetched=saved.per_rank.get(PREFETCHED, ()) if mid_epoch else (),
            positions=saved.per_rank.get(POSITIONS) or saved.shared.get(POSITIONS, {}),
            ended_epoch=ended_epoch,
            training=saved.per_rank.get(TRAINING) or saved.shared.get(TRAINING),
            base=self._base,
            gradients=tree.get(GRADIENTS),
        )
        return self._tell(fits=fits)

    def _tell(self, *, fits: bool) -> Sequence[str]:
        loaded = cast("LoadedCheckpoint", self.loaded)
        saved = loaded.saved
        if fits:
            return ()
        note = (
            f"{saved.name} was saved by {saved.world_size} ranks and there are {self._trainer.world_size} "
            "now: random numbers go on as far as ranks correspond"
        )
        if not loaded.positions and not loaded.ended_epoch:
            note += (
                ", and the position in the data is not resumed, so some samples of this epoch will be seen "
                "twice or not at all"
            )
        if self._trainer.is_global_zero:
            _logger.warning("%s", note)
        return (note,)


@final
class NewMemory:
    """A `StateSource` that reads into new memory, on every rank: all, or these items.

    Attributes:
        tree: what was read; empty before.
        saved: the checkpoint.
    """

    saved: SavedState

    def __init__(self, *items: str) -> None:
        self._items = items
        self.tree: dict[str, Any] = {}

    def capture(self) -> CapturedState:
        raise ConfigError("this only loads")

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        found = template({}, saved.sharded.get(PART, {}))
        return {PART: {name: each for name, each in found.items() if not self._items or name in self._items}}

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        self.tree, self.saved = dict(loaded[PART]), saved
        return ()

    def takes_all(self, saved: SavedState) -> bool:
        del saved
        return False


def by_number(optimizers: Iterable[_T]) -> dict[str, _T]:
    """Return what belongs to optimizers under their names in a checkpoint."""
    found = list(optimizers)
    return {"" if len(found) == 1 else str(number): each for number, each in enumerate(found)}


def check_optimizers(strategy: Any, states: Sequence[Any]) -> None:
    """Check that saved states are of the strategy's optimizers."""
    _check_number(strategy, len(states))
    for optimizer, state in zip(strategy.optimizers, states, strict=True):
        check_groups(strategy.model, optimizer, state)


def _check_number(strategy: Any, saved: int) -> None:
    if saved != len(strategy.optimizers):
        raise IncompatibleCheckpointError(
            f"the checkpoint holds {saved} optimizer(s), configure_optimizers() made "
            f"{len(strategy.optimizers)}; make as many, in the same order"
        )


def _changes_on_load(module: Any) -> bool:
    stock = next(cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule")
    return getattr(type(module), _LOAD_HOOK) is not getattr(stock, _LOAD_HOOK)


def _unlike(value: Any) -> Any:
    """Allocate memory of the same kind, so that the live tensor stays as it is."""
    return empty_like(value, value.dtype) if isinstance(value, torch.Tensor) else value


def _indices(saved: SavedEntries) -> list[str]:
    """Return the names of several optimizers in order; none for a single one."""
    first = {str(path[0]) for path in saved}
    return sorted(first, key=int) if all(name.isdecimal() for name in first) else []


def _as_list(optimizers: Mapping[str, Any]) -> list[Any]:
    if all(name.isdecimal() for name in optimizers):
        return [optimizers[name] for name in sorted(optimizers, key=int)]
    return [optimizers]


def plain_items(saved: SavedState, large: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return Lightning's keys; defaults if Lightning did not save the checkpoint."""
    items = {**saved.shared, **saved.per_rank}
    own = {
        key.removeprefix(PREFIX): plant(value, large)
        for key, value in items.items()
        if key.startswith(PREFIX) and key not in {POSITIONS, PREFETCHED, TRAINING}
    }
    version = {"pytorch-lightning_version": "2.5.0"}
    return {**version, "epoch": 0, "global_step": saved.step or 0, "lr_schedulers": [], **own}


def _ended_epoch(checkpoint: Mapping[str, Any]) -> bool:
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    progress = fit_loop.get("epoch_loop.batch_progress", {"is_last_batch": False})
    current = progress.get("current", {})
    return bool(progress["is_last_batch"] and current.get("processed") == current.get("ready"))


def capture(
    trainer: Any, checkpoint: Mapping[str, Any], fit: Fit | None, contents: Contents | None
) -> CapturedState:
    """Convert the dictionary that Lightning collected on this rank.

    Callbacks and the data module may differ between ranks, which Lightning ignores: their state is kept per
    rank, and rank 0's also for ranks that are added later.
    """
    rest = dict(checkpoint)
    model = trainer.strategy.model
    saved, bases = saved_part(model, rest.pop("state_dict"), contents, place=MODEL)
    tree: dict[str, Any] = {MODEL: saved}
    optimizers = rest.pop("optimizer_states", [])
    if any(optimizers):  # the state of Lightning's mock is empty
        tree[OPTIMIZER] = _one_or_several(optimizers)
    per_rank = _take_position(trainer, rest, fit)
    if fit is not None and (loaders := trainer.fit_loop._combined_loader) is not None:
        tell_of_hidden(loaders.flattened, fit.untold)
    if "lr_schedulers" in rest:
        rest["lr_schedulers"] = [function_free(state) for state in rest["lr_schedulers"]]
    large: dict[str, torch.Tensor] = {}
    small = {f"{PREFIX}{key}": hoist(value, str(key), large) for key, value in rest.items()}
    if large:
        tree[LARGE] = large
    if POSITIONS in per_rank:
        small[POSITIONS] = per_rank[POSITIONS]
    if fit is not None and (holders := fit.holders()):
        tree[GRADIENTS], small[GRADIENTS] = Gradients(model=model, optimizers=holders).capture()
    own = {f"{PREFIX}{key}" for key in ("callbacks", _datamodule_key(trainer))}
    per_rank |= {key: value for key, value in small.items() if key in own}
    # Last: a loader may draw from the global generator when asked for its state.
    per_rank[RNG] = rng_state()
    if fit is not None and (training := fit.capture()) is not None:
        per_rank[TRAINING] = training
        small[TRAINING] = {**training, "metrics": {"callback": training["metrics"]["callback"]}}
    trained_by = trainer.strategy.optimizers
    return CapturedState(
        sharded={PART: tree},
        per_rank=per_rank,
        shared={**small, **bases, SEED: rng_seed(per_rank[RNG])},
        alike=list(bases),
        local=local_buffers(model, tree[MODEL]),
        stable=stable_tensors(model, trained_by),
        optimizers=trained_by,
        positions=positions_in_samples(trainer.fit_loop, per_rank.get(POSITIONS)),
        configuration=lambda: configuration_of(trainer),
    )


def _one_or_several(states: list[Any]) -> Any:
    """Name optimizers as `TrainState` does, so that each reads the other's."""
    return states[0] if len(states) == 1 else {str(index): state for index, state in enumerate(states)}


def _take_position(trainer: Any, rest: dict[str, Any], fit: Fit | None) -> dict[str, Any]:
    """Take the position in the data out of the loops: every rank has its own."""
    fit_loop = dict(rest["loops"]["fit_loop"])
    fit_loop["state_dict"] = {
        key: value for key, value in fit_loop.get("state_dict", {}).items() if key != "combined_loader"
    }
    rest["loops"] = {**rest["loops"], "fit_loop": fit_loop}
    return positions(trainer.fit_loop, in_hand=0 if fit is None else fit.in_hand)


def unstorable(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return advice on callbacks and hooks whose state cannot be stored."""
    parts = {f"the state of callback {key}": state for key, state in checkpoint.get("callbacks", {}).items()}
    parts |= {f"{key!r} in the checkpoint": value for key, value in checkpoint.items() if key not in _CORES}
    problems = ((what, _problem_of(value)) for what, value in parts.items())
    return [
        f"{what} cannot be stored: {problem}. Leave it out of state_dict() or on_save_checkpoint(), or make "
        f"plain data of it. Other objects are stored as pickles: to load them, give {ALLOW_PICKLE}"
        for what, problem in problems
        if problem is not None
    ]


def _problem_of(value: Any) -> str | None:
    try:
        encode(hoist(value, "", {}))
    except NotEncodableError:
        try:
            torch.save(value, io.BytesIO())
        except Exception as error:  # noqa: BLE001 - pickle calls code of the user's; the text is returned
            return f"{type(error).__name__}: {error}"
    return None


def _datamodule_key(trainer: Any) -> str:
    return "" if trainer.datamodule is None else type(trainer.datamodule).__qualname__


def hoist(value: Any, path: str, found: dict[str, torch.Tensor]) -> Any:
    """Replace every large tensor by a reference; put tensors into `found` by path."""
    if _is_large(value):
        found[path] = value
        return {_MARK: path}
    return _rebuild(value, lambda each, key: hoist(each, f"{path}/{key}", found))


def plant(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict) and value.keys() == {_MARK}:
        return tensors[value[_MARK]]
    return _rebuild(value, lambda each, _: plant(each, tensors))


def _is_large(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    # A DTensor or ShardedTensor is a shard on every rank, whatever its size.
    return type(value) not in {torch.Tensor, torch.nn.Parameter} or value.nbytes > _SMALL_BYTES


def _rebuild(value: Any, convert: Callable[[Any, Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: convert(each, key) for key, each in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(convert(each, index) for index, each in enumerate(value))
    return value
