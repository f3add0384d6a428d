"""What of a model a checkpoint holds: all of it, or only what training changes.

Of the rest, the base, it holds the name and a checksum of each tensor, in shared items.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from hashlib import sha256
from logging import INFO, WARNING
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final
from weakref import ReferenceType, WeakKeyDictionary, ref
from zlib import crc32

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_core._torch_internals import has_flat_parameters, is_wrapped, version_of
from ckpt_core.coordination import place_in_job
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError, first_of
from ckpt_core.state._fsdp1 import is_fsdp1
from ckpt_core.state._model import Names, model_state
from ckpt_core.state._nested import dtype_name, shape_of
from ckpt_core.state._tensor_sums import checksums
from ckpt_core.types import SavedState
from ckpt_core.validation import one_of, require

_log = logger_of(__name__)

Contents: TypeAlias = Literal["all", "trainable"]
"""What a checkpoint holds of a model."""

_Facts: TypeAlias = list[Any]
"""Of a tensor: dtype, shape, checksum."""

_ITEM: Final = "model.base."
"""The start of the names of shared items; ranks with other names in their bases have items of their own."""
_MOST_LISTED: Final = 5
_UNNAMED: Final = "a base without a name"
_PACKED_BYTES: Final = 1 << 16
_PACKED: Final = frozenset(
    {torch.int8, torch.uint8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2}
)
"""Dtypes of packed weights; statistics, which training changes, have others."""


def contents_problem(contents: Any) -> str | None:
    """Return the problem of a value given as `contents`, or None."""
    return None if contents is None else one_of("contents", contents, ("all", "trainable"))


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
    """
    if not _is_wanted(model, contents):
        return dict(state), {}
    base = _base_of(model)
    base.update(model, state)
    base.tell(model, state, given=contents is not None)
    kept = {name: value for name, value in state.items() if name not in base.facts}
    if not base.facts:
        return kept, {}
    names = crc32("\n".join((place, *sorted(base.facts))).encode())
    in_order = json.dumps([[name, *base.facts[name]] for name in sorted(base.facts)], separators=(",", ":"))
    digest = sha256(in_order.encode()).hexdigest()
    item = {"place": place, "source": _source(model), "digest": digest, "tensors": dict(base.facts)}
    return kept, {f"{_ITEM}{names:08x}": item}


def supplied(model: nn.Module, saved: SavedState, contents: Contents | None, *, place: str) -> frozenset[str]:
    """Return the names that the base supplies; compare it before anything is loaded.

    Collective over the ranks that share tensors. `contents` is as given for coming saves.

    Raises:
        IncompatibleCheckpointError: the live base is not the one that the checkpoint refers to.
    """
    found = [each for name, each in saved.shared.items() if is_of_base(name) and each["place"] == place]
    record: dict[str, _Facts] = {name: facts for each in found for name, facts in each["tensors"].items()}
    if not found and not _is_wanted(model, contents):
        return frozenset()
    base, state = _base_of(model), model_state(model)
    if _is_wanted(model, contents):
        base.update(model, state)  # its values before they are overwritten
        base.untrusted |= base.facts.keys() - record.keys()  # a load may write into them
    if saved.world_size is None:  # of others: an adapter of PEFT, for example, has only what is trained
        trained = {name for name, each in Names(model).by_name.items() if each.requires_grad}
        return frozenset(state.keys() - trained)
    if found and not saved.include:
        try:
            _compare(record, base.described(state, record), sources=(found[0]["source"], _source(model)))
        except IncompatibleCheckpointError as error:
            if saved.strict:
                raise
            _log.warning("%s: partial load: %s", saved.name, error)
        names = Names(model).by_name
        if unfrozen := [name for name in record if name in names and names[name].requires_grad]:
            _log.warning(
                "%s: %d parameter(s) are trained now that were frozen at the save; they begin with the "
                "values of the base: %s",
                saved.name,
                len(unfrozen),
                first_of(unfrozen, _MOST_LISTED),
            )
    return frozenset(record)


def recorded_base(shared: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the `facts_of` the tensors of a base that was not saved."""
    items = [value for item, value in shared.items() if is_of_base(item)]
    facts = {name: fact for each in items for name, fact in each["tensors"].items()}
    return next((str(each["source"]) for each in items), ""), facts


def is_of_base(item: str) -> bool:
    """Return whether a shared item is a record of a base."""
    return item.startswith(_ITEM)


def base_names(saved: SavedState) -> list[str]:
    """Return the names of the bases that a checkpoint refers to; none if it is whole."""
    found = {str(value["source"]) for name, value in saved.shared.items() if is_of_base(name)}
    return sorted(each or _UNNAMED for each in found)


def _compare(saved: Mapping[str, _Facts], live: Mapping[str, _Facts], *, sources: tuple[str, str]) -> None:
    """Refuse a live base that differs from the saved one; `sources` are their names."""
    # Another rank may have names that this one lacks.
    lacking = sorted(saved.keys() - live.keys()) if place_in_job()[1] == 1 else []
    differing = [name for name in sorted(saved.keys() & live.keys()) if saved[name] != live[name]]
    if not lacking and not differing:
        return
    # What differs in more than its bytes tells most about the cause.
    differing.sort(key=lambda name: saved[name][1] == live[name][1])
    lines = [f"{name} is not in the model" for name in lacking]
    lines += [f"{name}: saved {_text(saved[name])}; live {_text(live[name])}" for name in differing]
    then, now = (each or _UNNAMED for each in sources)
    raise IncompatibleCheckpointError(
        f"it holds only what was trained, and the live model has another base. Saved with {then}; live is "
        f"{now}; {first_of(lines, _MOST_LISTED, '; ')}. Before the resume, load the same base in the "
        "same dtype and quantisation; or, to train on with the live one, load with strict=False",
        missing=lacking,
        mismatched=differing,
    )


def _text(facts: _Facts) -> str:
    dtype, shape, checksum = facts
    return f"{dtype} {list(shape)}, checksum {checksum}"


@final
class _LiveBase:
    """The base of one live model: what no training has changed.

    Attributes:
        facts: of each of its tensors, by name; empty before the first `update`.
        untrusted: names of those to compare again at the next `update`.
    """

    def __init__(self) -> None:
        self.facts: dict[str, _Facts] = {}
        self.untrusted = set[str]()
        self._seen: dict[str, _Version] = {}
        self._measured = self._told = False

    def begin(self, model: nn.Module) -> None:
        """Note the versions of frozen tensors, unless that is done."""
        if not self._seen:
            live = _live_tensors(Names(model))
            self._seen = {name: _Version.of(each) for name, each in live.items() if not each.requires_grad}

    def update(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Measure the base, or what may have changed of it; leave out what has changed."""
        of_model = Names(model)
        live = _live_tensors(of_model)
        # FSDP1 gives parameters other memory in every forward.
        watched: Collection[str] = live.keys() & self.facts.keys() if self._measured else live
        now = {name: _Version.of(live[name]) for name in (() if is_fsdp1(model) else watched)}
        if not self._measured:
            names = set(_frozen(of_model, state))
            # In other memory it may be: a model that is moved or cast before the first save is the base.
            seen = names & now.keys() & self._seen.keys()
            changed = {name for name in seen if not now[name].is_that_of(self._seen[name], in_place=False)}
            names -= changed
            self.facts = facts_of({name: state[name] for name in names})
            self._measured = True
        else:
            self.facts = {
                name: each
                for name, each in self.facts.items()
                if name in state and not (name in live and live[name].requires_grad)
            }
            names = (self.untrusted | (_merged(of_model) & now.keys())) & self.facts.keys()
            for name in self.facts.keys() & now.keys():
                if name not in self._seen or not now[name].is_that_of(self._seen[name], in_place=True):
                    names.add(name)
            measured = facts_of({name: state[name] for name in names})
            changed = {name for name in names if measured[name] != self.facts.pop(name)}
            self.facts |= {name: measured[name] for name in names - changed}
        self._seen |= {name: now[name] for name in names & now.keys()}
        if told := sorted(changed - self.untrusted):
            _log.warning(
                "%d frozen tensor(s) were changed in place, and are no part of the base any more: %s. "
                "Checkpoints hold them from now on",
                len(told),
                first_of(told, _MOST_LISTED),
            )
        self.untrusted = set()

    def described(self, state: Mapping[str, Any], names: Collection[str]) -> dict[str, _Facts]:
        """Return the live facts of tensors."""
        there = {name: state[name] for name in names if isinstance(state.get(name), torch.Tensor)}
        known = {name: self.facts[name] for name in there if name in self.facts}
        return known | facts_of({name: value for name, value in there.items() if name not in known})

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


class _Version(NamedTuple):
    tensor: ReferenceType[torch.Tensor]
    number: int
    memory: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Version:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Ranks must agree on what they measure again together; of shards, one may move alone.
        is_plain = local is tensor and not is_wrapped(tensor)
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape) if is_plain else ()
        return cls(ref(tensor), version_of(local), memory)

    def is_that_of(self, seen: _Version, *, in_place: bool) -> bool:
        """Return whether it is the same tensor, not written to, and perhaps not moved."""
        # By identity: weak references are compared by their tensors, element by element.
        same = self.tensor() is seen.tensor() and self.number == seen.number
        return same and (not in_place or self.memory == seen.memory)


_BASES: Final[WeakKeyDictionary[nn.Module, dict[tuple[str, ...], _LiveBase]]] = WeakKeyDictionary()
"""Of every model that was saved or loaded, as long as it lives: hosts make a state for each save."""
_DECIDED: Final[WeakKeyDictionary[nn.Module, dict[Contents | None, bool]]] = WeakKeyDictionary()
"""Of every model, whether an option means that only what is trained is saved."""


def _base_of(model: nn.Module) -> _LiveBase:
    """Return the base of a model, whatever wraps it at the moment."""
    names = tuple(model) if isinstance(model, nn.ModuleDict) else ()
    owner = Names(model[names[0]] if isinstance(model, nn.ModuleDict) and names else model).bare
    return _BASES.setdefault(owner, {}).setdefault(names, _LiveBase())


def _is_wanted(model: nn.Module, contents: Contents | None) -> bool:
    """Return whether only what is trained is saved; refuse it where it cannot be."""
    if contents == "all":
        return False
    decided = _DECIDED.setdefault(model, {})
    if contents not in decided:
        wanted = contents is not None or any(
            getattr(each, "peft_config", None) or getattr(each, "_hf_peft_config_loaded", False)
            for each in model.modules()
        )
        problem = _problem_of(model) if wanted else None
        if problem is not None and contents is not None:
            raise ConfigError(f'contents="trainable" {problem}; give contents="all"')
        if problem is not None:
            _log.warning('checkpoints hold all of this PEFT model, as contents="trainable" %s', problem)
        decided[contents] = wanted and problem is None
    return decided[contents]


def _problem_of(model: nn.Module) -> str | None:
    if is_fsdp1(model) and has_flat_parameters(model):
        return "needs FSDP1 with use_orig_params=True, which knows what is frozen"
    for name, each in model.named_parameters():
        if isinstance(each, DTensor) and is_wrapped(each.to_local()):
            return f"cannot compare {name}, whose shards are of a tensor subclass"
    return None


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


def _live_tensors(of_model: Names) -> dict[str, torch.Tensor]:
    live: dict[str, torch.Tensor] = dict(of_model.by_name)
    for raw, module in of_model.modules.items():
        for leaf, buffer in module.named_buffers(recurse=False):
            live[of_model.name(f"{raw}.{leaf}" if raw else leaf)] = buffer
    return live


def _frozen(of_model: Names, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of frozen parameters, and of packed weights in other forms.

    Other buffers are small, and training may change them.
    """
    modules = {of_model.name(f"{raw}." if raw else ""): module for raw, module in of_model.modules.items()}
    for name, value in state.items():
        if name in of_model.by_name:
            is_frozen = not of_model.by_name[name].requires_grad
        else:
            of = max((prefix for prefix in modules if name.startswith(prefix)), key=len)
            is_frozen = _is_packed(modules[of])
        if is_frozen and isinstance(value, torch.Tensor):
            yield name


def _is_packed(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not any(each.requires_grad for each in own) and any(
        each.dtype in _PACKED and each.dim() > 1 and each.nbytes > _PACKED_BYTES for each in own
    )


def facts_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, _Facts]:
    """Return dtype, shape and checksum of tensors, by name."""
    sums = checksums(tensors)
    return {
        name: [dtype_name(each.dtype), list(shape_of(each)), sums[name]] for name, each in tensors.items()
    }


def _merged(of_model: Names) -> set[str]:
    return {
        of_model.name(f"{raw}.{name}" if raw else name)
        for raw, module in of_model.modules.items()
        if getattr(module, "merged", False) is True
        for name, _ in module.named_parameters()
    }
