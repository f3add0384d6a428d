"""One fit: where in Lightning's loops it is, and what it changes besides weights.

The save of a step is made between two steps of Lightning, where nothing is half done: after a batch with its
validation and its schedulers, or after an epoch with all hooks of its end. Lightning has no hook there, and
its restart leaves out what follows. So methods of its loops call a listener at these points, and a resume
continues with what follows. What others save inside a hook is resumed by Lightning's own restart.

Lightning saves none of the metrics, switches and held gradients. Its own restart begins an epoch's means with
the batches after the save, and with every parameter and accumulation window as the script has set them up.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast, final
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ckpt_core._torch_internals import changes_of
from ckpt_core.data import LoaderPosition, hidden_position, track
from ckpt_core.disclosure import logger_of
from ckpt_core.hosting import shadow
from ckpt_core.state import NotEncodableError, derive_rng, encode, load_rng_state, unwrap_optimizer
from ckpt_core.types import DataPosition, SavedState

if TYPE_CHECKING:
    from lightning_ckpt._state import LightningState


BATCH: Final = "batch"
"""What follows a save: the next batch; after the last one, the hooks of the epoch's end."""
EPOCH: Final = "epoch"
"""What follows a save: the hooks of the next epoch's start."""

POSITIONS: Final = "lightning.positions"
PREFETCHED: Final = "lightning.prefetched"
RNG: Final = "rng"
SEED: Final = "rng_seed"
_OF_TRAINER = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision")

_MID_EPOCH: Final = "restarted_mid_epoch"
_BETWEEN: Final = {None, "on_train_end"}
_REPLACED: Final = (
    *("on_advance_end", "reset", "run", "on_run_start", "_load_combined_loader_states", "on_save_checkpoint"),
)
_COUNTS: Final = ("_update_count", "_computed", "_forward_cache")
_LOGGED_AS: Final = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    "metric_attribute",
)
_REDUCTIONS: Final = {
    f"{each.__module__ or 'torch'}.{each.__name__}": each
    for each in (torch.mean, torch.sum, torch.min, torch.max, sum, min, max)
}
_MOST_BYTES: Final = 8 << 20

_logger = logger_of(__name__)
_warned: Final = set[str]()


@final
class Fit:
    """One fit of a Trainer, and what a save adds to Lightning's dictionary.

    Concurrency: the thread that trains.

    Attributes:
        listener: the `Pacing` that is called between steps; its StopIteration ends training. None outside.
        measured: the metrics, with the steps at which they were measured.
        tokens: tokens trained on, of all ranks together.
        left: whether training is left after the save, because of a preemption.
        untold: the kinds of loaders that were named for hiding their position.
        validation_is_due: whether the validation of the last batch is left to the resume, by a preemption.
        makes_up: whether a resumed fit has such a validation to make.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.listener: Any = None
        self.measured = Measured()
        self.tokens = 0
        self.untold = set[str]()
        self.left = self.validation_is_due = self.makes_up = False
        self._fit_loop = fit_loop = trainer.fit_loop
        self._epoch_loop = epoch_loop = fit_loop.epoch_loop
        self._stock = type(fit_loop)
        self._resumed: str | None = None
        self._between: str | None = None
        self._before_stop: tuple[int | None, int | None, bool] | None = None
        self._initial: dict[tuple[str, str], bool] | None = None
        self._window = 0
        self._saved_metrics: dict[str, Any] = {}
        self._used: dict[Optimizer, list[tuple[ref[Tensor], int]]] = {}
        self._hooks: list[Any] = []
        self._loaded: LightningState | None = None
        self._holds_iterators = False
        self._validation: Sequence[Any] = ()
        shadow(epoch_loop, {"on_advance_end": self._advance_epoch})
        shadow(epoch_loop.val_loop, {"run": self._validate})
        made = {"on_advance_end": self._advance_fit, "_load_combined_loader_states": self._begin_loaders}
        shadow(fit_loop, made)
        fit_loop.on_save_checkpoint = dict  # loaders are asked by us, and may draw random numbers for it

    def release(self) -> None:
        """Give Lightning's loops back; a fit with nothing left to train has its metrics."""
        if self._initial is None:
            self.trainer._logger_connector._callback_metrics.update(self._saved_metrics)
        while self._hooks:
            self._hooks.pop().remove()
        self._fit_loop.__class__ = self._stock
        if self._before_stop is not None:
            self._fit_loop.min_epochs, self._epoch_loop.min_steps, _ = self._before_stop
        for loop in (self._fit_loop, self._epoch_loop, self._epoch_loop.val_loop):
            for name in _REPLACED:
                vars(loop).pop(name, None)

    @property
    def in_hand(self) -> int:
        """How many batches, 0 or 1, are drawn and not done: a restart begins with them."""
        progress = self._epoch_loop.batch_progress.current
        return max(0, int(progress.ready - progress.processed))

    @property
    def following(self) -> str | None:
        """What follows a save made now; None inside a hook and after an exception."""
        return self._between if self.trainer.lightning_module._current_fx_name in _BETWEEN else None

    @property
    def epoch_is_over(self) -> bool:
        return bool(self._epoch_loop._num_ready_batches_reached())

    def ends_at(self, step: int) -> bool:
        """Return whether Lightning makes no step after `step`, the present one."""
        loop = self._fit_loop
        if step == self._epoch_loop.max_steps or (self.trainer.should_stop and loop._can_stop_early):
            return True
        return bool(self.epoch_is_over and loop.epoch_progress.current.processed == loop.max_epochs)

    def stop(self) -> None:
        """End training after this step, whatever the least number of steps is."""
        fit_loop, loop = self._fit_loop, self._epoch_loop
        if self._before_stop is None:
            self._before_stop = fit_loop.min_epochs, loop.min_steps, self.trainer.should_stop
        self.trainer.should_stop = True
        fit_loop.min_epochs = loop.min_steps = 0

    def failed(self) -> None:
        """Note that an exception has ended the training, anywhere in a step."""
        self._between = None

    # What a save adds, and a resume takes.

    def capture(self) -> dict[str, Any] | None:
        """Return what is not in Lightning's dictionary; None before training has begun."""
        if self._initial is None:
            return None
        trainer, following = self.trainer, self.following
        metrics = {"callback": {name: _plain(value) for name, value in trainer.callback_metrics.items()}}
        window, initial = trainer.accumulate_grad_batches, self._initial
        return {
            "following": following,
            "validates": self.validation_is_due,
            "left": self.left,
            "stops": self._deciding(),
            # In a validation, for one, Lightning has all modules in evaluation mode.
            "switches": None
            if following is None
            else {
                "flags": [
                    [*key, now] for key, now in _switches(trainer) if initial.get(key, not now) is not now
                ],
                "window": None if window == self._window else window,
            },
            "metrics": metrics if following is None else metrics | _means(trainer),
            "measured": {name: step for name, (_, step) in self.measured.items()},
            "tokens": self.tokens,
        }

    def _deciding(self) -> list[str] | None:
        """Return the callbacks that may have decided to end training; None if nothing has.

        Not a `Timer`, which looks again at the start of each fit, and may have been given more time.
        """
        found = {each: {cls.__name__ for cls in type(each).__mro__} for each in self.trainer.callbacks}
        remaining = [each.time_remaining() for each, names in found.items() if "Timer" in names]
        stops = self.trainer.should_stop if self._before_stop is None else self._before_stop[2]
        if not stops or any(seconds is not None and seconds <= 0 for seconds in remaining):
            return None
        return [each.state_key for each, names in found.items() if "EarlyStopping" in names]

    def resume(self, loaded: LightningState) -> None:
        """Continue with what followed a save; perhaps nothing, as training was to end."""
        self._loaded, self._holds_iterators = loaded, True
        self._validation = loaded.positions.get("validation", ())
        if (saved := loaded.training) is None:
            return
        following, deciding = saved["following"], saved["stops"]
        self._saved_metrics = saved["metrics"]["callback"]
        # Without the callback that has decided it, the script is to train on.
        present = {each.state_key for each in self.trainer.callbacks}
        stops = deciding is not None and present.issuperset(deciding)
        if following is not None:
            self._resumed, self.makes_up = following, saved["validates"]
            if following == BATCH and (stops or saved["left"]):
                # The step may be the last one, after which Lightning would not begin.
                names = {"__module__": self._stock.__module__, "done": False}
                self._fit_loop.__class__ = type(self._stock.__name__, (self._stock,), names)
            self._fit_loop.reset = self._reset_fit
        if not stops:
            return
        self.trainer.should_stop = True
        if self.trainer.is_global_zero:
            _logger.warning(
                "this training had decided to end at the saved step, by early stopping or another use of "
                "trainer.should_stop: the decision holds. To train on, leave out the callback that made it, "
                "or give the Trainer min_epochs= or min_steps="
            )

    def begin(self) -> None:
        """Take what a save has added, right before the first batch."""
        trainer, module, loaded = self.trainer, self.trainer.lightning_module, self._loaded
        if loaded is not None and self._holds_iterators:
            self._holds_iterators = False
            self._follow_validation()
            resume_data(trainer, loaded)
        self._initial, self._window = dict(_switches(trainer)), trainer.accumulate_grad_batches
        for optimizer in self._stepped_by_script():
            if isinstance(optimizer, Optimizer):
                self._hooks.append(optimizer.register_step_post_hook(self._note_used))
        if loaded is None or (saved := loaded.training) is None:
            return
        if saved["switches"] is not None:
            _load_switches(trainer, saved["switches"])
        metrics = trainer._logger_connector._callback_metrics
        metrics.update(_moved(saved["metrics"]["callback"], module.device))
        same_ranks = loaded.saved is not None and loaded.saved.world_size == trainer.world_size
        if same_ranks and "results" in saved["metrics"]:
            _load_means(trainer, saved["metrics"])
        self.measured = Measured(
            {name: (metrics[name], step) for name, step in saved["measured"].items() if name in metrics}
        )
        self.tokens = saved["tokens"]
        if saved["following"] == BATCH:
            _set_up_averaging(trainer)

    def holders(self) -> list[Any]:
        """Return the optimizers whose gradients a later step will use; collective.

        Each optimizer that the script steps has a window of its own, which may last over several batches;
        what a step has used stays in memory until it is zeroed.
        """
        if self.following is None:
            return []
        on_any_rank = self.trainer.strategy.reduce_boolean_decision
        return [each for each in self._stepped_by_script() if on_any_rank(self._holds(each), all=False)]

    def _stepped_by_script(self) -> list[Any]:
        by_script = not self.trainer.lightning_module.automatic_optimization
        return [unwrap_optimizer(each) for each in self.trainer.strategy.optimizers if by_script]

    def _note_used(self, optimizer: Optimizer, *_: Any) -> None:
        self._used[optimizer] = [(ref(grad), changes_of(grad)) for grad in _gradients(optimizer)]

    def _holds(self, optimizer: Optimizer) -> bool:
        noted = self._used.get(optimizer, ())
        used = {id(grad): version for each, version in noted if (grad := each()) is not None}
        new = (grad for grad in _gradients(optimizer) if used.get(id(grad)) != changes_of(grad))
        return any(bool(grad.any()) for grad in new)

    # Called by Lightning's loops, in place of their own methods.

    def _advance_epoch(self, data_fetcher: Any) -> None:
        listener, loop = self.listener, self._epoch_loop
        self._between = BATCH
        if listener is not None:
            listener.after_batch()
        type(loop).on_advance_end(loop, data_fetcher)
        if listener is not None:
            listener.after_step()

    def _validate(self) -> Any:
        loop, connector = self._epoch_loop.val_loop, self.trainer._logger_connector
        listener, first = self.listener, connector._first_loop_iter
        loop.setup_data()  # as it begins itself, to no effect then
        self._follow_validation()
        if listener is None or self.trainer.sanity_checking:
            return type(loop).run(loop)
        listener.before_validation()
        results = type(loop).run(loop)
        self.trainer.training, connector._first_loop_iter = True, first  # as Lightning does next
        listener.after_validation()
        return results

    def _follow_validation(self) -> None:
        combined, loaded = self._epoch_loop.val_loop._combined_loader, self._loaded
        if combined is None:
            return
        follow(combined.flattened)
        states, self._validation = self._validation, ()
        for loader, state in zip(combined.flattened, states, strict=False):
            if loaded is not None:
                _resume_loader(self.trainer, loaded, loader, state)

    def _advance_fit(self) -> None:
        listener, loop = self.listener, self._fit_loop
        if listener is not None:
            listener.before_epoch_end()
        over = self.epoch_is_over
        type(loop).on_advance_end(loop)
        self._between = EPOCH if over else None
        if listener is not None:
            listener.after_epoch()

    def _begin_loaders(self) -> None:
        """Follow loaders before their iterators are made, in a resume by `begin`."""
        loop = self._fit_loop
        combined = loop._combined_loader
        follow(combined.flattened)
        if self.trainer.is_global_zero:
            tell_of_hidden(combined.flattened, self.untold)
        if self._holds_iterators:
            combined.__class__ = _held(type(combined))
        else:
            self._stock._load_combined_loader_states(loop)

    def _reset_fit(self) -> None:
        """Take the counters as they were saved, instead of guessing from them."""
        fit_loop, epoch_loop = self._fit_loop, self._epoch_loop
        vars(fit_loop).pop("reset")
        torch.set_grad_enabled(True)
        optimization = (epoch_loop.automatic_optimization, epoch_loop.manual_optimization)
        for loop in (fit_loop, epoch_loop, epoch_loop.val_loop, *optimization):
            loop._restarting = loop._loaded_from_state_dict = False
        if self._resumed == EPOCH:
            # Iterators are made where an uninterrupted run makes them.
            fit_loop._resuming_from_checkpoint = False
            if every := self.trainer.reload_dataloaders_every_n_epochs:
                ended = fit_loop.epoch_progress.current.processed - 1
                fit_loop._last_train_dl_reload_epoch = ended - ended % every
            return
        fit_loop._restart_stage = _MID_EPOCH
        epoch_loop.reset = lambda: vars(epoch_loop).pop("reset")
        epoch_loop.on_run_start = self._run_epoch

    def _run_epoch(self, data_fetcher: Any) -> None:
        """Begin in the middle of an epoch, with the validation that was left out."""
        loop = self._epoch_loop
        vars(loop).pop("on_run_start")
        self._fit_loop.__class__ = self._stock
        type(loop).on_run_start(loop, data_fetcher)
        if not self.makes_up:
            return
        if self.trainer._val_check_time_interval is not None:
            self.trainer._last_val_time = -float("inf")
        loop.on_advance_end(data_fetcher)
        self.makes_up = False


@final
class Measured(dict[str, tuple[Any, int]]):
    """Lightning's callback metrics, each with the step at which it was measured last.

    Lightning keeps the last value of every metric for the whole fit. A checkpoint that took them as they
    are would claim the validation loss of other weights, and be ranked by it.
    """

    def note(self, metrics: Mapping[str, Any], step: int) -> None:
        """Note what was measured since the last note, at `step`."""
        for name, value in metrics.items():
            known = self[name][0] if name in self else None
            # Equal values may come from two measurements. Every access to Lightning's metrics gives a new
            # view of the result; the memory of a known one is not freed, so that no other has its address.
            same = known is value
            if isinstance(known, Tensor) and isinstance(value, Tensor):
                same = known.data_ptr() == value.data_ptr()
            if not same:
                self[name] = value, step

    def at(self, step: int) -> dict[str, float]:
        found = {name: value for name, (value, measured) in sorted(self.items()) if measured == step}
        return {name: float(value) for name, value in found.items() if torch.as_tensor(value).numel() == 1}


def _held(stock: type[Any]) -> type[Any]:
    """Return the class of a combined loader that is iterated once for its length only."""

    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807 - it is a method of the class below
        self.__class__ = stock
        modes = sys.modules[stock.__module__]._SUPPORTED_MODES
        self._iterator = modes[self._mode]["iterator"](self.flattened, self._limits)
        return iter(())

    return type(stock.__name__, (stock,), {"__module__": stock.__module__, "__iter__": __iter__})


def _switches(trainer: Any) -> Iterator[tuple[tuple[str, str], bool]]:
    """Yield what hooks change of a model, by the name of a module or parameter.

    Callbacks unfreeze layers and widen accumulation windows in hooks of an epoch's start, which a resume
    within the epoch does not call. What the script sets up itself is its own to change between two runs.
    """
    module = trainer.lightning_module
    for name, each in module.named_modules():
        for switch in ("training", "track_running_stats"):
            if (value := getattr(each, switch, None)) is not None:
                yield (name, switch), bool(value)
    for name, each in module.named_parameters():
        yield (name, "requires_grad"), each.requires_grad


def _load_switches(trainer: Any, changed: Mapping[str, Any]) -> None:
    module = trainer.lightning_module
    holders: dict[str, Any] = {**dict(module.named_modules()), **dict(module.named_parameters())}
    for name, switch, value in changed["flags"]:
        if hasattr(holders.get(name), switch):
            setattr(holders[name], switch, value)
    trainer.accumulate_grad_batches = changed["window"] or trainer.accumulate_grad_batches


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from (each.grad for each in group["params"] if each.grad is not None)


def _set_up_averaging(trainer: Any) -> None:
    """Have `StochasticWeightAveraging` make its scheduler within an epoch.

    It does so at the start of an epoch, where it finds its state loaded and this epoch averaged already.
    """
    for callback in trainer.callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if "StochasticWeightAveraging" not in names or callback._scheduler_state is None:
            continue
        if callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            groups = trainer.optimizers[0].param_groups
            saved = [dict(group) for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, values in zip(groups, saved, strict=True):
                group.update(values)  # a new scheduler begins with a step of its own


def _means(trainer: Any) -> dict[str, Any]:
    """Return the running means of an epoch, and the state of torchmetrics."""
    connector, results = trainer._logger_connector, {}
    for key, result in trainer.fit_loop.epoch_loop._results.items():
        meta = result.meta
        state = _state_of(result)
        # A metric that some ranks share has a group of processes, which is of this process only.
        if meta.sync.group is None and _plain_bytes(state) is not None:
            results[key] = {
                "state": state,
                "reset": result.has_reset,
                "logged": {name: getattr(meta, name) for name in _LOGGED_AS},
                "reduce": next(name for name, each in _REDUCTIONS.items() if each is meta.reduce_fx),
                "sync": meta.sync.should,
                "rank_zero_only": meta.sync.rank_zero_only,
            }
    metrics = {name: _state_of(each) for name, each in _metrics(trainer.lightning_module)}
    return {
        "results": results,
        "metrics": {name: state for name, state in metrics.items() if _is_storable(name, state)},
        "hook": connector._current_fx,
        "first_batch": connector._first_loop_iter,
    }


def _load_means(trainer: Any, saved: Mapping[str, Any]) -> None:
    connector, module = trainer._logger_connector, trainer.lightning_module
    metrics, results = dict(_metrics(module)), trainer.fit_loop.epoch_loop._results
    for name, state in saved["metrics"].items():
        if name in metrics:
            _put_back(metrics[name], state, metrics[name].device)
    for key, entry in saved["results"].items():
        logged = entry["logged"]
        attribute = logged["metric_attribute"]
        if attribute is not None and attribute not in metrics:
            continue
        value = torch.zeros((), device=module.device) if attribute is None else metrics[attribute]
        results.log(
            **logged,
            value=value,
            reduce_fx=_REDUCTIONS[entry["reduce"]],
            sync_dist_fn=trainer.strategy.reduce,
            rank_zero_only=entry["rank_zero_only"],
            batch_size=1,
        )
        results[key].meta.sync.should = entry["sync"]  # only now: nothing is to be exchanged here
        results[key].has_reset = entry["reset"]
        _put_back(results[key], entry["state"], module.device)
    connector._current_fx, connector._first_loop_iter = saved["hook"], saved["first_batch"]


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    kind = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    yield from ((name, each) for name, each in module.named_modules() if isinstance(each, kind))


def _state_of(metric: Any) -> dict[str, Any]:
    return {name: _plain(getattr(metric, name)) for name in (*_COUNTS, *metric._defaults)}


def _put_back(metric: Any, state: Mapping[str, Any], device: torch.device) -> None:
    for name, value in _moved(state, device).items():
        setattr(metric, name, value)


def _is_storable(name: str, state: Mapping[str, Any]) -> bool:
    """Return whether the state of a metric is plain and small; warn once if not."""
    size = _plain_bytes(state)
    if size is not None and size <= _MOST_BYTES:
        return True
    if name not in _warned:
        _warned.add(name)
        why = "is not plain" if size is None else f"has {size >> 20} MiB"
        _logger.warning(
            "the state of metric %s %s and is not saved: after a resume in the middle of an epoch its value "
            "covers the batches after the save only",
            name, why,
        )  # fmt: skip
    return False


def _plain_bytes(value: Any) -> int | None:
    """Return the bytes of the tensors in a plain value; None if it is not plain."""
    if isinstance(value, list | tuple | dict):
        sizes = [_plain_bytes(each) for each in (value.values() if isinstance(value, dict) else value)]
        return None if None in sizes else sum(size or 0 for size in sizes)
    if type(value) in {torch.Tensor, torch.nn.Parameter}:
        return int(value.nbytes)
    return 0 if value is None or isinstance(value, bool | int | float | str) else None


def _plain(value: Any) -> Any:
    """Copy tensors, which may be part of a graph or be changed in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_moved(each, device) for each in value]
    return {key: _moved(each, device) for key, each in value.items()} if isinstance(value, dict) else value


def positions(fit_loop: Any, *, in_hand: int) -> dict[str, Any]:
    """Return the positions in a fit's loaders, and batches drawn ahead of them."""
    combined = fit_loop._combined_loader
    if combined is None:
        return {}
    training = [position_in(loader) for loader in combined.flattened]
    draws_again = all(each is not None and each.replayable for each in training)
    in_hand = in_hand if draws_again else 0
    evaluated = fit_loop.epoch_loop.val_loop._combined_loader
    validation = [position_in(each) for each in (() if evaluated is None else evaluated.flattened)]
    ended = bool(fit_loop.epoch_loop.batch_progress.is_last_batch) and not in_hand
    ahead = [] if ended else list(getattr(fit_loop._data_fetcher, "batches", ()))
    return {
        POSITIONS: {
            "training": [
                each and each.state(ended=ended, ahead=len(ahead) + in_hand, kept=not draws_again)
                for each in training
            ],
            "validation": [each and each.state(ended=True) for each in validation],
            # A loader that is cycled has been through; the epoch ends when all have.
            "consumed": list(getattr(combined._iterator, "_consumed", ())),
        },
        PREFETCHED: [] if draws_again else _storable(ahead),
    }


def follow(loaders: Iterable[Any]) -> None:
    """Track torch loaders from now on, before they are iterated."""
    for loader in loaders:
        if isinstance(loader, DataLoader):
            track(loader)


def position_in(loader: Any) -> LoaderPosition | None:
    follow([loader])
    return LoaderPosition(loader) if hidden_position(loader) is None else None


def tell_of_hidden(loaders: Iterable[Any], told: set[str]) -> None:
    """Warn once of each kind of loader that hides its position."""
    for loader in loaders:
        why, kind = hidden_position(loader), type(loader).__name__
        if why is not None and kind not in told:
            told.add(kind)
            _logger.warning(
                "the position in a %s cannot be saved: %s. A resume in the middle of an epoch begins its "
                "data again: use a torch DataLoader that hands out each batch as it is drawn, or give it "
                "state_dict and load_state_dict",
                kind,
                why,
            )


def _storable(batches: list[Any]) -> list[Any]:
    """Return batches that Lightning drew ahead of a loader without a length."""
    try:
        encode(batches)
    except NotEncodableError as error:
        _logger.warning(
            "a resume will skip %d batch(es) that Lightning drew ahead of a loader without a length: %s. "
            "Use plain tensors, or give the dataset a length",
            len(batches), error,
        )  # fmt: skip
        return []
    return batches


def positions_in_samples(fit_loop: Any, saved: Mapping[str, Any] | None) -> dict[str, DataPosition]:
    """Return how far a fit is in its training data, by loader."""
    if saved is None:
        return {}
    states, epoch = saved["training"], max(0, fit_loop.epoch_progress.current.started - 1)
    found = {
        "training" if len(states) == 1 else f"training.{number}": position.in_samples(state, epoch=epoch)
        for number, (loader, state) in enumerate(
            zip(fit_loop._combined_loader.flattened, states, strict=True)
        )
        if state is not None and (position := position_in(loader)) is not None
    }
    return {name: position for name, position in found.items() if position is not None}


def configuration_of(trainer: Any) -> dict[str, Any]:
    """Return what a fit was configured with: hyperparameters, and what decides steps."""
    return {
        "module": dict(getattr(trainer.lightning_module, "hparams", {})),
        "data": dict(getattr(trainer.datamodule, "hparams", {})),
        **{name: getattr(trainer, name, None) for name in _OF_TRAINER},
    }


def resume_data(trainer: Any, loaded: LightningState) -> None:
    """Put back the position in the training data, right before the first batch.

    A loader goes on from its position when its next iterator is made, which draws nothing from the global
    generators if the epoch has begun; and everything as usual if a new one begins.
    """
    fit_loop = trainer.fit_loop
    fetcher, combined = fit_loop._data_fetcher, fit_loop._combined_loader
    states = loaded.positions.get("training", ())
    found = [
        _resume_loader(trainer, loaded, loader, state, trains=not loaded.ended_epoch)
        for loader, state in zip(combined.flattened, states, strict=False)
    ]
    if loaded.ended_epoch or not states:
        for loader in combined.flattened:
            _set_sampler_epoch(trainer, loader)
    if not loaded.ended_epoch:
        iter(fetcher)
        if loaded.prefetched:
            fetcher.batches[:0] = loaded.prefetched
        if consumed := loaded.positions.get("consumed"):
            combined._iterator._consumed = list(consumed)
    # Lightning's own restart makes no iterators for the epoch after one whose end had begun.
    epochs = fit_loop.epoch_progress.current
    begins = loaded.ended_epoch and epochs.processed == epochs.started
    _count_batches(fit_loop, loaded, {number: each for number, each in enumerate(found) if each is not None})
    _load_rng(trainer, cast("SavedState", loaded.saved))
    if begins and (loaded.training is None or loaded.training["following"] is None):
        iter(fetcher)


def _resume_loader(
    trainer: Any, loaded: LightningState, loader: Any, state: Any, *, trains: bool = False
) -> tuple[int, int] | None:
    """Put back a position; return batches done and to come, if ranks have changed."""
    position = position_in(loader)
    if position is None or state is None:
        if trains:
            _logger.warning(
                "a %s cannot tell its position, so its epoch begins again: use a torch DataLoader, or "
                "give it state_dict and load_state_dict",
                type(loader).__name__,
            )
        return None
    ranks = cast("SavedState", loaded.saved).world_size
    for note in position.restore(state, same_ranks=ranks in {None, trainer.world_size}):
        if trainer.is_global_zero:
            _logger.warning("%s", note)
    return position.dealt


def _count_batches(fit_loop: Any, loaded: LightningState, dealt: Mapping[int, tuple[int, int]]) -> None:
    """Count batches as if the present ranks had made those before."""
    progress, batches = fit_loop.epoch_loop.batch_progress.current, fit_loop.max_batches
    if batches == math.inf or not (loaded.ended_epoch or dealt):
        return
    done = batches
    if not loaded.ended_epoch:
        # The epoch ends with the last batch dealt.
        combined = fit_loop._combined_loader
        lengths = {number: len(combined.flattened[number]) for number in dealt}
        decides = min if combined._mode == "min_size" else max
        number = decides(lengths, key=lengths.__getitem__)
        before, rest = dealt[number]
        done = int(min(batches, max(0, batches - rest if batches == lengths[number] else before)))
    unfinished = progress.ready - progress.completed
    progress.ready = progress.started = progress.processed = done
    progress.completed = done - unfinished


def _load_rng(trainer: Any, saved: SavedState) -> None:
    state, seed = saved.per_rank.get(RNG), saved.shared.get(SEED)
    if state is not None:
        for note in load_rng_state(state):
            _logger.warning("%s", note)
    elif seed is not None:  # of other ranks
        derive_rng(seed, trainer.global_rank)


def _set_sampler_epoch(trainer: Any, loader: Any) -> None:
    """Set the epoch of samplers before they shuffle; Lightning does it afterwards."""
    fit_loop = trainer.fit_loop
    progress = fit_loop.epoch_progress.current
    ended = fit_loop.epoch_loop.batch_progress.is_last_batch and progress.processed < progress.started
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(progress.processed + int(ended))  # type: ignore[union-attr]
