"""The training state of a Trainer: captured from Lightning, and handed back."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ALLOW_PICKLE, ConfigError, IncompatibleCheckpointError
from ckpt_core.hosting import by_number
from ckpt_core.state import (
    Contents,
    Gradients,
    NotEncodableError,
    Override,
    StateSource,
    Trained,
    check_groups,
    empty_like,
    encode,
    function_free,
    model_state,
    rng_seed,
    rng_state,
    stable_tensors,
    template,
    under,
)
from ckpt_core.types import CapturedState, SavedEntries, SavedState
from lightning_ckpt._fit import (
    POSITIONS,
    PREFETCHED,
    RNG,
    SEED,
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

_logger = logger_of(__name__)
_LOAD_HOOK = "on_load_checkpoint"
_MARK = "$tensor"
_SMALL_BYTES = 1 << 16


@final
class LightningState(StateSource):
    """The state of a Trainer.

    `apply` loads nothing into Lightning: the strategy does, when Lightning calls it, so that hooks see and
    may change everything first. Only tensors are read into place, unless a hook may change them.

    Attributes:
        refusal: why nothing could be: the model or an optimizer is not of the checkpoint's kind.
        change: hyperparameters to change, once optimizers and schedulers are loaded; None for no change.
        saved: the checkpoint that was read, which the attributes after it are of; None before.
        checkpoint: the dictionary that Lightning and its hooks expect.
        prefetched: batches to train on before the loader's next.
        positions: in the loaders; empty in checkpoints of others.
        ended_epoch: whether it was saved when an epoch's last batch was done.
        training: what `Fit` saved; None of saves outside a training.
        base: names of weights that are not in it, because the model has them.
        gradients: those of an open accumulation window; None of a save between windows.

    Args:
        checkpoint: what Lightning has collected already; collected on demand if None.
        fit: what it changes besides; None outside a fit.
        has_optimizers: whether the strategy has its optimizers, to load into.
    """

    checkpoint: dict[str, Any]
    prefetched: Sequence[Any]
    positions: Mapping[str, Any]
    ended_epoch: bool
    training: Mapping[str, Any] | None
    gradients: Mapping[str, Any] | None

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
        self._given = checkpoint
        self._fit = fit
        self._has_optimizers = has_optimizers
        self._contents: Contents | None = contents
        self._wanted = Override()
        self.base = frozenset[str]()
        self.saved: SavedState | None = None
        self.refusal: IncompatibleCheckpointError | None = None
        self.change: Override | None = None

    def check_override(self, change: Override) -> None:
        self._wanted = change

    def override(self, change: Override) -> None:
        self.change = change

    def capture(self) -> CapturedState:
        """Convert the dictionary that Lightning collected on this rank.

        Callbacks and the data module may differ between ranks, which Lightning ignores: their state is kept
        per rank, and rank 0's also for ranks that are added later.
        """
        trainer, fit = self._trainer, self._fit
        rest = dict(self._collected())
        model, trained_by = trainer.strategy.model, trainer.strategy.optimizers
        states = rest.pop("optimizer_states", [])
        named = by_number(states) if any(states) else {}  # the state of Lightning's mock is empty
        given = {_place(name): state for name, state in named.items()}
        trained = self._trained(named).capture({**given, (PART, MODEL): rest.pop("state_dict")})
        tree = dict(trained.sharded[PART])
        # The position in the data is taken out of the loops: every rank has its own.
        loop = dict(rest["loops"]["fit_loop"])
        loop["state_dict"] = {k: v for k, v in loop.get("state_dict", {}).items() if k != "combined_loader"}
        rest["loops"] = {**rest["loops"], "fit_loop": loop}
        per_rank = positions(trainer.fit_loop, in_hand=0 if fit is None else fit.in_hand)
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
        datamodule = "" if trainer.datamodule is None else type(trainer.datamodule).__qualname__
        own = {f"{PREFIX}{key}" for key in ("callbacks", datamodule)}
        per_rank |= {key: value for key, value in small.items() if key in own}
        # Last: a loader may draw from the global generator when asked for its state.
        per_rank[RNG] = rng_state()
        if fit is not None and (training := fit.capture()) is not None:
            per_rank[TRAINING] = training
            small[TRAINING] = {**training, "metrics": {"callback": training["metrics"]["callback"]}}
        return replace(
            trained,
            sharded={PART: tree},
            per_rank=per_rank,
            shared={**small, **trained.shared, SEED: rng_seed(per_rank[RNG])},
            stable=stable_tensors(model, trained_by),
            optimizers=trained_by,
            positions=positions_in_samples(trainer.fit_loop, per_rank.get(POSITIONS)),
            configuration=lambda: configuration_of(trainer),
        )

    def _trained(self, names: Iterable[str]) -> Trained:
        strategy = self._trainer.strategy
        optimizers = zip(names, strategy.optimizers, strict=False)
        return Trained(
            {(PART, MODEL): strategy.model},
            {_place(name): (strategy.model, optimizer) for name, optimizer in optimizers},
            contents=self._contents,
        )

    def _collected(self) -> Mapping[str, Any]:
        dump: Callable[..., Mapping[str, Any]] = self._trainer._checkpoint_connector.dump_checkpoint
        return dump(weights_only=False) if self._given is None else self._given

    def unstorable(self) -> list[str]:
        """Return advice on callbacks and hooks whose state cannot be stored."""
        collected = self._collected()
        callbacks = collected.get("callbacks", {}).items()
        parts = {f"the state of callback {key}": state for key, state in callbacks}
        parts |= {f"{key!r} in the checkpoint": each for key, each in collected.items() if key not in _CORES}
        return [
            f"{what} cannot be stored: {problem}. Leave it out of state_dict() or on_save_checkpoint(), or "
            f"make plain data of it. Other objects are stored as pickles: to load them, give {ALLOW_PICKLE}"
            for what, value in parts.items()
            if (problem := _problem_of(value)) is not None
        ]

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        try:
            return {PART: self._target(saved)}
        except IncompatibleCheckpointError as error:
            self.refusal = error
            raise

    def _target(self, saved: SavedState) -> dict[str, Any]:
        entries = saved.sharded.get(PART, {})
        strategy, module = self._trainer.strategy, self._trainer.lightning_module
        optimizers = under(entries, OPTIMIZER) if self._trainer.state.fn == "fit" else {}
        names: Sequence[str] = ()
        if optimizers and self._has_optimizers:
            found = {str(path[0]) for path in optimizers}
            names = sorted(found, key=int) if all(name.isdecimal() for name in found) else [""]
            _check_number(strategy, len(names))
        self._loading = self._trained(names)
        tree = self._loading.target(replace(saved, strict=saved.strict and module.strict_loading))[PART]
        self.base, live = self._loading.bases[PART, MODEL], model_state(strategy.model)
        tree[MODEL] = self._model_target(tree[MODEL], live, under(entries, MODEL))
        if optimizers and not names:
            tree[OPTIMIZER] = template({}, optimizers)
        if large := under(entries, LARGE):
            # Averaging callbacks keep copies of sharded weights, by their names.
            twins = {str(path[0]): live.get(str(path[0]).rpartition("/")[2]) for path in large}
            shards = {path: _unlike(each) for path, each in twins.items() if isinstance(each, DTensor)}
            tree[LARGE] = template(shards, large)
        if self._trainer.state.fn != "fit":
            return tree
        if GRADIENTS in saved.shared:
            gradients = Gradients(
                model=strategy.model, optimizers=strategy.optimizers if self._has_optimizers else ()
            )
            try:
                tree[GRADIENTS] = gradients.target(under(entries, GRADIENTS), saved.shared[GRADIENTS])
            except IncompatibleCheckpointError as error:  # ranks that are gone had their own
                _logger.warning("the gradients of %s are left out: %s", saved.name, error)
                tree[GRADIENTS] = {}
        return tree

    def _model_target(
        self, found: dict[str, Any], live: Mapping[str, Any], saved: SavedEntries
    ) -> dict[str, Any]:
        module = self._trainer.lightning_module
        stock = next(cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule")
        if getattr(type(module), _LOAD_HOOK) is not getattr(stock, _LOAD_HOOK):
            # Its own memory: the hook may drop or change what must not have reached the model by then.
            return template({name: _unlike(value) for name, value in live.items()}, saved)
        if module.strict_loading:
            return found
        return template(live, {path: entry for path, entry in saved.items() if path[0] in live})

    def begin(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Callable[[], None]:
        states = _as_list(loaded[PART].get(OPTIMIZER, {"param_groups": []}))
        self._wanted.check(by_number(state["param_groups"] for state in states))
        try:
            self._loading.begin(loaded, saved)
        except IncompatibleCheckpointError as error:
            self.refusal = error
            raise
        return lambda: None

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        tree = loaded[PART]
        self.saved, self.gradients = saved, tree.get(GRADIENTS)
        self.checkpoint = checkpoint = plain_items(saved, tree.get(LARGE, {}))
        checkpoint["state_dict"] = dict(tree[MODEL])
        if OPTIMIZER in tree:
            checkpoint["optimizer_states"] = _as_list(tree[OPTIMIZER])
        fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
        progress = fit_loop.get("epoch_loop.batch_progress", {"is_last_batch": False})
        current = progress.get("current", {})
        done = current.get("processed") == current.get("ready")
        self.ended_epoch = bool(progress["is_last_batch"] and done)
        self.positions = saved.per_rank.get(POSITIONS) or saved.shared.get(POSITIONS, {})
        self.training = saved.per_rank.get(TRAINING) or saved.shared.get(TRAINING)
        self.prefetched = ()
        ranks = self._trainer.world_size
        if saved.world_size in {None, ranks}:
            if not self.ended_epoch:
                self.prefetched = saved.per_rank.get(PREFETCHED, ())
            return ()
        note = (
            f"{saved.name} was saved by {saved.world_size} ranks and there are {ranks} "
            "now: random numbers go on as far as ranks correspond"
        )
        if not self.positions and not self.ended_epoch:
            note += (
                ", and the position in the data is not resumed, so some samples of this epoch will be seen "
                "twice or not at all"
            )
        if self._trainer.is_global_zero:
            _logger.warning("%s", note)
        return (note,)


@final
class NewMemory(StateSource):
    """A source that reads into new memory, on every rank: all, or these items.

    Attributes:
        tree: what was read; empty before.
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


def _place(optimizer: str) -> tuple[str, ...]:
    return (PART, OPTIMIZER, optimizer) if optimizer else (PART, OPTIMIZER)


def check_optimizers(strategy: Any, states: Sequence[Any]) -> None:
    _check_number(strategy, len(states))
    for optimizer, state in zip(strategy.optimizers, states, strict=True):
        check_groups(strategy.model, optimizer, state)


def _check_number(strategy: Any, saved: int) -> None:
    if saved != len(strategy.optimizers):
        raise IncompatibleCheckpointError(
            f"the checkpoint holds {saved} optimizer(s), configure_optimizers() made "
            f"{len(strategy.optimizers)}; make as many, in the same order"
        )


def _unlike(value: Any) -> Any:
    """Allocate memory of the same kind, so that the live tensor stays as it is."""
    return empty_like(value, value.dtype) if isinstance(value, torch.Tensor) else value


def _as_list(optimizers: Mapping[str, Any]) -> list[Any]:
    if all(name.isdecimal() for name in optimizers):
        return [optimizers[name] for name in sorted(optimizers, key=int)]
    return [optimizers]


def plain_items(saved: SavedState, large: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return Lightning's keys; defaults if Lightning did not save the checkpoint."""
    own = {
        key.removeprefix(PREFIX): plant(value, large)
        for key, value in {**saved.shared, **saved.per_rank}.items()
        if key.startswith(PREFIX) and key not in {POSITIONS, PREFETCHED, TRAINING}
    }
    version = {"pytorch-lightning_version": "2.5.0"}
    return {**version, "epoch": 0, "global_step": saved.step or 0, "lr_schedulers": [], **own}


def _problem_of(value: Any) -> str | None:
    try:
        encode(hoist(value, "", {}))
    except NotEncodableError:
        try:
            torch.save(value, io.BytesIO())
        except Exception as error:  # noqa: BLE001 - pickle calls code of the user's; the text is returned
            return f"{type(error).__name__}: {error}"
    return None


def hoist(value: Any, path: str, found: dict[str, torch.Tensor]) -> Any:
    """Replace every large tensor by a reference; put tensors into `found` by path."""
    # A DTensor or ShardedTensor is a shard on every rank, whatever its size.
    plain = type(value) in {torch.Tensor, torch.nn.Parameter}
    if isinstance(value, torch.Tensor) and not (plain and value.nbytes <= _SMALL_BYTES):
        found[path] = value
        return {_MARK: path}
    return _rebuild(value, lambda each, key: hoist(each, f"{path}/{key}", found))


def plant(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict) and value.keys() == {_MARK}:
        return tensors[value[_MARK]]
    return _rebuild(value, lambda each, _: plant(each, tensors))


def _rebuild(value: Any, convert: Callable[[Any, Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: convert(each, key) for key, each in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(convert(each, index) for index, each in enumerate(value))
    return value
