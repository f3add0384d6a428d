"""What of a model a checkpoint holds: all of it, or only what training changes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from logging import INFO, WARNING
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_core._torch_internals import has_flat_parameters, is_wrapped, version_of
from ckpt_core.coordination import place_in_job
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state._fsdp1 import is_fsdp1
from ckpt_core.state._model import model_state
from ckpt_core.state._parameter_names import ParameterNames, Prefixes, bare
from ckpt_core.state._tensors import dtype_name, shape_of
from ckpt_core.state.contents._record import BaseRecord, TensorFacts
from ckpt_core.state.contents._tensor_sums import add_up, own_checksum
from ckpt_core.types import SavedState
from ckpt_core.validation import one_of, require

_log = logger_of(__name__)

Contents: TypeAlias = Literal["all", "trainable"]
"""What a checkpoint holds of a model."""

_ALL: Final = "all"
_TRAINABLE: Final = "trainable"
_PACKED_BYTES: Final = 1 << 16
_PACKED: Final = frozenset(
    {torch.int8, torch.uint8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2}
)
"""Dtypes of packed weights; statistics, which training changes, have others."""

_Live: TypeAlias = dict[str, torch.Tensor]


def contents_problem(contents: Any) -> str | None:
    """Return the problem of a value given as `contents`, or None."""
    return None if contents is None else one_of("contents", contents, (_ALL, _TRAINABLE))


def begin(model: nn.Module, contents: Contents | None) -> None:
    """Note the frozen tensors of a model, to see changes before the first save.

    Raises:
        ConfigError: `contents` is none, or cannot be had of this model.
    """
    require("checkpoints", contents_problem(contents))
    if _is_wanted(model, contents):
        _base_of(model).begin(model)


def saves_base(model: nn.Module, contents: Contents | None) -> bool:
    """Return whether a checkpoint is to hold all of a model.

    Raises:
        ConfigError: it is not, and that cannot be had of this model.
    """
    return not _is_wanted(model, contents)


def saved_part(
    model: nn.Module, state: Mapping[str, Any], contents: Contents | None, *, place: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what of a model's state to save, and items that refer to the rest.

    Collective over the ranks that share tensors, at the first call and after a change of the base.

    Args:
        model: the model.
        state: its `model_state`.
        contents: as the user has given it.
        place: of the model in the state.
    """
    if not _is_wanted(model, contents):
        return dict(state), {}
    base = _base_of(model)
    base.update(model, state)
    base.tell(model, state, given=contents is not None)
    kept = {name: value for name, value in state.items() if name not in base.facts}
    return kept, base.record(model).as_items(place)


def supplied(model: nn.Module, saved: SavedState, contents: Contents | None, *, place: str) -> frozenset[str]:
    """Return the names that the base supplies; compare it before anything is loaded.

    Collective over the ranks that share tensors.

    Args:
        model: the live model.
        saved: the checkpoint.
        contents: as the user has given it for coming saves.
        place: of the model in the state.

    Raises:
        IncompatibleCheckpointError: the live base is not the one that the checkpoint refers to.
    """
    record, wanted = BaseRecord.of(saved, place), _is_wanted(model, contents)
    if record is None and not wanted:
        return frozenset()
    base, state = _base_of(model), model_state(model)
    if wanted:
        base.update(model, state)  # its values before they are overwritten
        base.distrust(base.facts.keys() - (frozenset() if record is None else record.tensors.keys()))
    if record is None:
        return frozenset()
    if not saved.include:
        try:
            record.compare(base.described(model, state, record), alone=place_in_job()[1] == 1)
        except IncompatibleCheckpointError as error:
            if saved.strict:
                raise
            _log.warning("%s: partial load: %s", saved.name, error)
        _tell_unfrozen(model, record, saved)
    return frozenset(record.tensors)


def _tell_unfrozen(model: nn.Module, record: BaseRecord, saved: SavedState) -> None:
    names = ParameterNames.of(model).by_name
    unfrozen = [name for name in record.tensors if name in names and names[name].requires_grad]
    if unfrozen:
        _log.warning(
            "%s: %d parameter(s) are trained now that were frozen at the save; they begin with the values of "
            "the base: %s",
            saved.name,
            len(unfrozen),
            _first(unfrozen),
        )


@final
class _LiveBase:
    """The base of one live model: what no training has changed.

    Attributes:
        facts: of each of its tensors, by name; empty before the first `update`.
    """

    def __init__(self) -> None:
        self.facts: dict[str, TensorFacts] = {}
        self._seen: dict[str, _Version] = {}
        self._untrusted = set[str]()
        self._measured = self._told = False

    def begin(self, model: nn.Module) -> None:
        """Note the versions of frozen tensors, unless that is done."""
        if not self._seen:
            live = _live_tensors(Prefixes(model))
            self._seen = {name: _version(each) for name, each in live.items() if not each.requires_grad}

    def update(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Measure the base, or what may have changed of it; leave out what has changed."""
        prefixes = Prefixes(model)
        live = _live_tensors(prefixes)
        if not self._measured:
            self._measure(model, state, live)
            return
        unfrozen = [name for name in self.facts if name in live and live[name].requires_grad]
        gone = [name for name in self.facts if name not in state]
        for name in (*unfrozen, *gone):
            del self.facts[name]
        suspects = self._untrusted & self.facts.keys()
        if not is_fsdp1(model):  # which gives parameters other memory in every forward
            suspects |= _merged(prefixes) & self.facts.keys() & live.keys()
            now = {name: _version(live[name]) for name in self.facts if name in live}
            suspects |= {name for name, each in now.items() if not each.is_memory_of(self._seen.get(name))}
        self._seen |= {name: _version(live[name]) for name in suspects if name in live}
        measured = _facts({name: state[name] for name in suspects})
        changed = sorted(name for name in suspects if measured[name] != self.facts[name])
        for name in changed:
            del self.facts[name]
        self._leave_out([name for name in changed if name not in self._untrusted])
        self._untrusted = set()

    def distrust(self, names: Collection[str]) -> None:
        """Compare these again at the next `update`: a load may write into them."""
        self._untrusted |= set(names)

    def described(self, model: nn.Module, state: Mapping[str, Any], record: BaseRecord) -> BaseRecord:
        """Return the live facts of the tensors in a record."""
        there = {name: state[name] for name in record.tensors if isinstance(state.get(name), torch.Tensor)}
        known = {name: self.facts[name] for name in there if name in self.facts}
        others = {name: value for name, value in there.items() if name not in known}
        return BaseRecord(source=_source(model), tensors={**known, **_facts(others)})

    def record(self, model: nn.Module) -> BaseRecord:
        """Return what a checkpoint says of this base."""
        return BaseRecord(source=_source(model), tensors=self.facts)

    def tell(self, model: nn.Module, state: Mapping[str, Any], *, given: bool) -> None:
        """Log once what checkpoints hold."""
        if not self._told and place_in_job()[0] == 0:
            _log.log(
                INFO if given else WARNING,
                'checkpoints hold what is trained (contents="trainable"%s): %d of %d tensors of the model. '
                'The base, %s, is compared at a resume by checksums; contents="all" saves it, too',
                "" if given else ", the default for PEFT models",
                len(state) - len(self.facts),
                len(state),
                _source(model) or "which has no name: keep what makes it",
            )
        self._told = True

    def _measure(self, model: nn.Module, state: Mapping[str, Any], live: _Live) -> None:
        names = set(_frozen(model, state))
        begun = {name for name in names if name in live and name in self._seen and not is_fsdp1(model)}
        changed = sorted(name for name in begun if self._is_touched(name, live[name]))
        self._leave_out(changed)
        names -= set(changed)
        self._seen = {name: _version(live[name]) for name in names if name in live}
        self.facts = _facts({name: state[name] for name in names})
        self._measured = True

    def _is_touched(self, name: str, live: torch.Tensor) -> bool:
        # In other memory it may be: a model that is moved or cast before the first save is the base.
        return not _version(live).is_content_of(self._seen[name])

    @staticmethod
    def _leave_out(changed: Collection[str]) -> None:
        if changed:
            _log.warning(
                "%d frozen tensor(s) were changed in place, and are no part of the base any more: %s. "
                "Checkpoints hold them from now on",
                len(changed),
                _first(changed),
            )


_BASES: Final[WeakKeyDictionary[nn.Module, dict[tuple[str, ...], _LiveBase]]] = WeakKeyDictionary()
"""Of every model that was saved or loaded, as long as it lives: hosts make a state for each save."""
_DECIDED: Final[WeakKeyDictionary[nn.Module, dict[Contents | None, bool]]] = WeakKeyDictionary()
"""Of every model, whether an option means that only what is trained is saved."""


def _base_of(model: nn.Module) -> _LiveBase:
    """Return the base of a model, whatever wraps it at the moment."""
    names = tuple(model) if isinstance(model, nn.ModuleDict) else ()
    owner = bare(model[names[0]] if isinstance(model, nn.ModuleDict) and names else model)
    return _BASES.setdefault(owner, {}).setdefault(names, _LiveBase())


def _is_wanted(model: nn.Module, contents: Contents | None) -> bool:
    """Return whether only what is trained is to be saved.

    Raises:
        ConfigError: it is, and that cannot be had of this model.
    """
    if contents == _ALL:
        return False
    decided = _DECIDED.setdefault(model, {})
    if contents not in decided:
        decided[contents] = _decide(model, contents)
    return decided[contents]


def _decide(model: nn.Module, contents: Contents | None) -> bool:
    if contents is None and not _has_adapters(model):
        return False
    problem = _problem_of(model)
    if problem is not None and contents is not None:
        raise ConfigError(f'contents="trainable" {problem}; give contents="all"')
    if problem is not None:
        _log.warning('checkpoints hold all of this PEFT model, as contents="trainable" %s', problem)
    return problem is None


def _problem_of(model: nn.Module) -> str | None:
    if is_fsdp1(model) and has_flat_parameters(model):
        return "needs FSDP1 with use_orig_params=True, which knows what is frozen"
    packed = (name for name, each in model.named_parameters() if _is_packed_shard(each))
    name = next(packed, None)
    return None if name is None else f"cannot compare {name}, whose shards are of a tensor subclass"


def _is_packed_shard(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and is_wrapped(parameter.to_local())


def _has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT, or transformers with it, has put adapters into the model."""
    return any(
        getattr(each, "peft_config", None) or getattr(each, "_hf_peft_config_loaded", False)
        for each in model.modules()
    )


def _source(model: nn.Module) -> str:
    """Return the path or hub id that the model gives for its base, if any."""
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        configs = list(adapters.values()) if isinstance(adapters, Mapping) else []
        named = [getattr(each, "base_model_name_or_path", None) for each in configs]
        named.append(getattr(getattr(module, "config", None), "name_or_path", None))
        found = next((each for each in named if isinstance(each, str) and each), None)
        if found is not None:
            return found
    return ""


def _live_tensors(prefixes: Prefixes) -> _Live:
    """Return the live parameters and buffers by their names in a checkpoint."""
    live: _Live = dict(prefixes.parameters())
    for raw, module in prefixes.modules.items():
        for leaf, buffer in module.named_buffers(recurse=False):
            live[prefixes.name(f"{raw}.{leaf}" if raw else leaf)] = buffer
    return live


def _frozen(model: nn.Module, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of frozen parameters, and of packed weights in other forms.

    Other buffers are small, and training may change them.
    """
    prefixes = Prefixes(model)
    parameters = dict(prefixes.parameters())
    modules = {prefixes.name(f"{raw}." if raw else ""): module for raw, module in prefixes.modules.items()}
    packed = {prefix for prefix, module in modules.items() if _is_packed(module)}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        if name in parameters:
            if not parameters[name].requires_grad:
                yield name
            continue
        prefix = name
        while prefix and prefix not in modules:
            prefix = prefix[:-1].rpartition(".")[0] + "." if "." in prefix[:-1] else ""
        if prefix in packed:
            yield name


def _is_packed(module: nn.Module) -> bool:
    """Return whether a module trains nothing, and holds weights in a packed form."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not any(each.requires_grad for each in own) and any(
        each.dtype in _PACKED and each.dim() > 1 and each.nbytes > _PACKED_BYTES for each in own
    )


def _facts(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorFacts]:
    own = {name: own_checksum(each) for name, each in tensors.items()}
    sums = add_up(tensors, own)
    return {
        name: TensorFacts(dtype_name(each.dtype), shape_of(each), sums[name])
        for name, each in tensors.items()
    }


class _Version(NamedTuple):
    tensor: ReferenceType[torch.Tensor]
    number: int
    memory: tuple[Any, ...]

    def is_content_of(self, seen: _Version | None) -> bool:
        """Return whether it is the same tensor, and was written to no more."""
        # By identity: weak references are compared by their tensors, element by element.
        return seen is not None and self.tensor() is seen.tensor() and self.number == seen.number

    def is_memory_of(self, seen: _Version | None) -> bool:
        """Return whether it has the same memory and form, too."""
        return seen is not None and self.is_content_of(seen) and self.memory == seen.memory


def _version(tensor: torch.Tensor) -> _Version:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # Ranks must agree on what they measure again together; of shards, one may move alone.
    is_plain = local is tensor and not is_wrapped(tensor)
    memory = (tensor.data_ptr(), tensor.dtype, tensor.shape) if is_plain else ()
    return _Version(ref(tensor), version_of(local), memory)


def _merged(prefixes: Prefixes) -> set[str]:
    """Return parameters into which PEFT has merged adapters, through `.data`."""
    return {
        prefixes.name(f"{raw}.{name}" if raw else name)
        for raw, module in prefixes.modules.items()
        if getattr(module, "merged", False) is True
        for name, _ in module.named_parameters()
    }


def _first(names: Collection[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join([*names][:5]) + more
