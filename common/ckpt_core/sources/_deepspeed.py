"""Checkpoints of DeepSpeed: ZeRO, and its Universal Checkpoint, located.

Paths: ("model", NAME), weights as the module has them, at stage 3 the fp32 partitions; ("master", NAME), the
optimizer's fp32 weights; ("optimizer", "state", NAME, …) and ("optimizer", "param_groups", …), by names of
parameters; ("scheduler", …); and ("client_state", …), all else.

Source of the layouts: `utils/zero_to_fp32.py` and `checkpoint/ds_to_universal.py` of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, TypeAlias, final

import torch

from ckpt_core.crew import run_all
from ckpt_core.dcp import boxes_of_range
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.formats.codec import damage, relative_paths
from ckpt_core.sources._layout import Layout, StoredChunk, StoredTensor
from ckpt_core.sources._torch_save import Namespace, find_plain, layout_of, read_tree
from ckpt_core.storage import Storage, read_small

_POINTERS: Final = ("latest", "latest_universal")
_SCRIPT: Final = "zero_to_fp32.py"
"""What DeepSpeed puts beside them."""
_STATES: Final = re.compile(r".*_states\.pt")
_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_00_model_states\.pt")
_OPTIMIZER: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_00_optim_states\.pt")
_UNIVERSAL: Final = "zero"
_GLOBAL: Final = "optimizer_state.pt"
_MASTER: Final = "fp32"
_MOST_POINTER_BYTES: Final = 1024
_THREADS: Final = 16
_WEIGHTS: Final = 3
"""The stage that divides the weights."""
_CONVERT: Final = (
    "convert it by `python -m deepspeed.checkpoint.ds_to_universal --input_folder … --output_folder …`, and "
    "load what that writes"
)
_OWN_KEYS: Final = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "ds_config", "ds_version", "dp_world_size", "mp_world_size",
        "checkpoint_parallel_dimensions", "universal_checkpoint_info",
    }
)  # fmt: skip
"""Of model states; the rest is what the user gave, and counters."""
_INERT: Final = frozenset({"deepspeed", "megatron"})
"""Packages whose objects lie in these files, as scalers of losses and arguments do."""

_Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class _Kept(Namespace):
    """Stand-in for an object of a class: its arguments and attributes, as plain data."""

    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__({"arguments": arguments} if arguments else {})


def find_data(module: str, name: str) -> Any:
    """Return what stands for a name, as `find_plain` does; data for objects, too."""
    package = module.partition(".")[0]
    if name == "ZeroStageEnum" and package == "deepspeed":
        return int
    return _Kept if package in _INERT else find_plain(module, name)


def find_deepspeed(storage: Storage, directory: str, files: Sequence[str]) -> Layout | None:
    """Describe a directory that DeepSpeed saved, or that of one step in it."""
    tag = ""
    if (pointer := next((name for name in _POINTERS if name in files), None)) is not None:
        content = read_small(storage, f"{directory}/{pointer}", _MOST_POINTER_BYTES)
        tag = content.decode("utf-8", "replace").strip()
        try:
            relative_paths([tag])
            inside = [each.name for each in storage.list(f"{directory}/{tag}") if not each.is_directory]
        except ValueError:
            inside = []
        if not inside and _SCRIPT in files:
            raise damage(f"{storage.url}/{directory}/{pointer}", f"names {tag!r:.80}, which is not there")
        files = inside
    if not (states := list(filter(_STATES.fullmatch, files))):
        return None
    step = _Step(storage, directory, tag, states)
    try:
        return step.universal() if storage.list(f"{directory}/{step.below(_UNIVERSAL)}") else step.zero()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise damage(step.place, f"is not what DeepSpeed writes: {error!r:.300}") from error


@final
@dataclass(frozen=True, slots=True)
class _Parameters:
    masters: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    state: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def add(self, name: str, kind: str, value: Any) -> None:
        if kind == _MASTER:
            self.masters[name] = value
        else:
            self.state.setdefault(name, {})[kind] = value

    def items(self, weights: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": weights, "master": self.masters, "optimizer": {"state": self.state, **groups}}


@final
@dataclass(frozen=True, slots=True)
class _Step:
    """The directory of one step.

    Attributes:
        files: its files of states, of models and of optimizers.
    """

    storage: Storage
    directory: str
    tag: str
    files: Sequence[str]

    @property
    def place(self) -> str:
        return f"{self.storage.url}/{self.directory}/{self.tag}".rstrip("/")

    def zero(self) -> Layout:
        """Describe what ZeRO saved: optimizer states in a file for each rank, or in none."""
        if others := self._divided():
            raise IncompatibleCheckpointError(
                f"{self.place} is of a model whose layers, tensors or experts were divided among ranks "
                f"({others[0]}): {_CONVERT}"
            )
        models = self._models()
        model, shapes = models[0], _shapes(models[0]["param_shapes"])
        ranks = [each["optimizer_state_dict"] for each in self._by_rank(_OPTIMIZER)]
        if not ranks:
            if shapes:
                raise damage(self.place, "lacks the files of optimizer states")
            optimizer = {"optimizer": model["optimizer"]} if isinstance(model["optimizer"], dict) else {}
            return self._layout("a checkpoint of DeepSpeed", model, {"model": model["module"], **optimizer})
        stage = self._stage(ranks, len(models))
        found = self._found(ranks, shapes, stage)
        weights = model["module"] if stage < _WEIGHTS else _weights(found.masters, models)
        items = found.items(weights, _groups(_base(ranks[0]), shapes))
        return self._layout(f"a checkpoint of DeepSpeed's ZeRO stage {stage}", model, items)

    def _found(
        self, ranks: Sequence[Mapping[str, Any]], shapes: Sequence[_Shapes], stage: int
    ) -> _Parameters:
        """Return what all ranks have of each parameter."""
        found, steps = _Parameters(), set[Any]()
        # Elements after each parameter of a group, where they are aligned.
        paddings = ranks[0].get("param_alignment_paddings") or [()] * len(shapes)
        for index, group in enumerate(shapes):
            for kind, parts in _flat(ranks, index):
                if kind == "step":
                    steps.update(map(self._number, parts))
                for name, value in _given(group, parts, paddings[index], stage=stage):
                    found.add(name, kind, value)
        if len(steps) > 1:
            raise damage(self.place, f"has optimizer states of different steps: {sorted(steps)}")
        return found

    def _stage(self, ranks: Sequence[Mapping[str, Any]], num_models: int) -> int:
        # The optimizer for bf16 with fp32 accumulation divides as stage 1 does, and names no stage.
        stages = {each.get("zero_stage", 1) for each in ranks}
        counts = {max(each) if isinstance(each, list) else each for each in _each(ranks, "partition_count")}
        stage: int = max(stages)
        if len(stages) != 1 or stage not in {1, 2, _WEIGHTS}:
            raise damage(self.place, f"has files of different stages of ZeRO, or of unknown ones: {stages}")
        if counts != {len(ranks)} or (stage == _WEIGHTS and num_models != len(ranks)):
            raise damage(
                self.place,
                f"was saved by {' or '.join(map(str, counts))} ranks, and has {len(ranks)} files of "
                f"optimizer states, {num_models} of model states: one is missing, or of another save",
            )
        if any(_each(ranks, "ds_zero_partition_groups")):
            raise IncompatibleCheckpointError(f"{self.place} has experts that some ranks divided: {_CONVERT}")
        return stage

    def universal(self) -> Layout:
        """Describe a Universal Checkpoint: one directory for each parameter."""
        models, found = self._models(), _Parameters()
        is_whole = not self._divided()  # else the model states are those of a part
        shapes = _shapes(models[0]["param_shapes"])
        trained = {name: shape for group in shapes for name, shape in group.items()}
        files = self._of_parameters({*trained, _GLOBAL})
        trees = self._read([f"{_UNIVERSAL}/{name}/{file}" for name, file in files])
        for (name, file), tree in zip(files, trees, strict=True):
            kind = file.removesuffix(".pt")
            value = tree["param"] if isinstance(tree, dict) else tree
            shape = trained.get(name) if is_whole and kind != "step" else None
            if shape is not None and value.shape != shape:
                value = _cut(shape, [(value, 0, prod(shape))])  # the converter of stage 3 leaves it flat
            # What it adds for buffers and frozen parameters is fp32, and they were not.
            if name in trained or not is_whole:
                found.add(name, kind, value)
        optimizer = self._read([f"{_UNIVERSAL}/{_GLOBAL}"])[0]
        step = _step_of(optimizer)
        for each in found.state.values() if step is not None else ():
            each.setdefault("step", step)
        groups = _groups(optimizer, shapes)
        items = found.items(_weights(found.masters, models) if is_whole else found.masters, groups)
        return self._layout("a Universal Checkpoint of DeepSpeed", models[0], items)

    def _of_parameters(self, needed: Collection[str]) -> list[tuple[str, str]]:
        """List the directories of parameters, which must be there, and their files."""
        place = f"{self.directory}/{self.below(_UNIVERSAL)}"
        listed = self.storage.list(place)
        if missing := sorted(set(needed).difference(each.name for each in listed)):
            raise damage(self.place, f"lacks {_UNIVERSAL}/{missing[0]}")
        found: list[tuple[str, str]] = []

        def look(name: str) -> None:
            files = [each.name for each in self.storage.list(f"{place}/{name}")]
            if name in needed and f"{_MASTER}.pt" not in files:
                raise damage(self.place, f"lacks {_UNIVERSAL}/{name}/{_MASTER}.pt")
            found.extend((name, file) for file in files if file.endswith(".pt"))

        run_all(look, [each.name for each in listed if each.is_directory], _THREADS)
        return sorted(found)

    def _divided(self) -> list[str]:
        return sorted(
            name for name in self.files if not _MODEL.fullmatch(name) and not _OPTIMIZER.fullmatch(name)
        )

    def _models(self) -> list[Mapping[str, Any]]:
        found = self._by_rank(_MODEL)
        if not found:
            raise damage(self.place, "lacks the file of model states")
        if len({each["global_steps"] for each in found}) > 1:
            raise damage(self.place, "has model states of different steps: a file is left from another save")
        return found

    def below(self, name: str) -> str:
        return f"{self.tag}/{name}" if self.tag else name

    def _by_rank(self, pattern: re.Pattern[str]) -> list[Any]:
        ranks = {int(found[1] or 0): name for name in self.files if (found := pattern.fullmatch(name))}
        lacking = set(range(len(ranks))) - ranks.keys()
        if lacking:
            raise damage(self.place, f"has {ranks[max(ranks)]}, and lacks that of rank {min(lacking)}")
        return self._read([ranks[rank] for rank in sorted(ranks)])

    def _read(self, names: Sequence[str]) -> list[Any]:
        found: dict[str, Any] = {}

        def read(name: str) -> None:
            try:
                found[name] = read_tree(self.storage, self.directory, self.below(name), find=find_data)
            except FileNotFoundError as error:
                raise damage(self.place, f"lacks {name}") from error

        run_all(read, names, _THREADS)
        return [found[name] for name in names]

    def _number(self, value: Any) -> Any:
        """Return a number, which may be a tensor in a file."""
        if not isinstance(value, StoredTensor):
            return value
        [chunk] = value.chunks
        content = bytearray(value.dtype.itemsize)
        with self.storage.open_ranges(f"{self.directory}/{chunk.path}") as reader:
            reader.read_into(chunk.offset, memoryview(content))
        return torch.frombuffer(content, dtype=value.dtype).item()

    def _layout(self, kind: str, model: Mapping[str, Any], items: Mapping[str, Any]) -> Layout:
        scheduler = {"scheduler": model["lr_scheduler"]} if isinstance(model["lr_scheduler"], dict) else {}
        others = {str(key): each for key, each in model.items() if key not in _OWN_KEYS}
        return layout_of(kind, {**items, **scheduler, "client_state": others}, step=model["global_steps"])


def _each(ranks: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [each.get(key) for each in ranks]


def _base(rank: Mapping[str, Any]) -> Any:
    """Return the state of torch's optimizer: a dict, or an elastic list."""
    return rank["optimizer_state_dict" if "fp32_flat_groups" in rank else "base_optimizer_state"]


def _shapes(saved: Any) -> list[_Shapes]:
    """Return the shapes of trained parameters, for each flat tensor in its order."""
    found: list[_Shapes] = [{name: tuple(shape) for name, shape in group.items()} for group in saved or []]
    if any(type(size) is not int or size < 0 for each in found for shape in each.values() for size in shape):
        raise ValueError("shapes of parameters that are none")
    return found


def _flat(ranks: Sequence[Mapping[str, Any]], index: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield the kinds of values of one group, and what each rank has of them."""
    key = "fp32_flat_groups" if "fp32_flat_groups" in ranks[0] else "single_partition_of_fp32_groups"
    yield _MASTER, [rank[key][index] for rank in ranks]
    states = [_base(rank) for rank in ranks]
    found = [each[index] if isinstance(each, list) else each["state"].get(index, {}) for each in states]
    for kind in found[0]:
        yield kind, [each[kind] for each in found]
    counts = [] if isinstance(states[0], list) else [each["param_groups"][0].get("step") for each in states]
    if "step" not in found[0] and counts and None not in counts:
        yield "step", counts  # fused optimizers count in their groups


def _given(
    group: _Shapes, parts: Sequence[Any], paddings: Sequence[int], *, stage: int
) -> Iterator[tuple[str, Any]]:
    """Yield what each parameter of a group has of one kind of values."""
    if not all(isinstance(each, StoredTensor) and len(each.shape) == 1 for each in parts):
        yield from ((name, parts[0]) for name in group)
        return
    world_size, at = len(parts), 0
    for name, shape, padding in zip(group, group.values(), paddings or [0] * len(group), strict=True):
        count = prod(shape)
        if stage == _WEIGHTS:
            yield name, _cut(shape, _shares(parts, at, count))
            at += -(-count // world_size)
        else:
            yield name, _cut(shape, _of_joined(parts, at, at + count))
            at += count + padding
    sizes = [part.shape[0] for part in parts]
    alignment = 2 * world_size  # at stages 1 and 2 the end is padded, or was; see `zero_to_fp32`
    if set(sizes) != {at} if stage == _WEIGHTS else -(-at // alignment) != -(-sum(sizes) // alignment):
        raise ValueError(f"parameters of {at} elements in partitions of {sizes[:3]}")


def _shares(parts: Sequence[StoredTensor], at: int, count: int) -> Iterator[tuple[StoredTensor, int, int]]:
    """Yield the equal shares of a parameter, all at one place, the last padded."""
    share = -(-count // len(parts))
    for rank, part in enumerate(parts):
        yield part, at, max(0, min(share, count - rank * share))


def _of_joined(
    parts: Sequence[StoredTensor], start: int, stop: int
) -> Iterator[tuple[StoredTensor, int, int]]:
    """Yield the pieces of a range of partitions that follow one another."""
    begin = 0
    for part in parts:
        end = begin + part.shape[0]
        first, last = max(start, begin), min(stop, end)
        if first <= last:
            yield part, first - begin, last - first
        begin = end


def _cut(shape: tuple[int, ...], pieces: Iterable[tuple[StoredTensor, int, int]]) -> StoredTensor:
    """Make a tensor of pieces of flat ones: first element and number of each."""
    at, chunks, dtypes = 0, list[StoredChunk](), set[torch.dtype]()
    for flat, first, count in pieces:
        [whole] = flat.chunks
        if whole.strides is not None or len(flat.shape) != 1 or not 0 <= first <= flat.shape[0] - count:
            raise ValueError(f"{count} elements from {first} on, of a partition of shape {flat.shape}")
        dtypes.add(flat.dtype)
        start = whole.offset + first * flat.dtype.itemsize
        for box in boxes_of_range(shape, at, at + count):
            sizes = tuple(high - low for low, high in box)
            offsets = tuple(low for low, _ in box)
            chunks.append(StoredChunk(path=whole.path, offset=start, offsets=offsets, sizes=sizes))
            start += prod(sizes) * flat.dtype.itemsize
        at += count
    if at != prod(shape) or len(dtypes) != 1:
        raise ValueError(f"{at} elements of {dtypes} for a parameter of shape {shape}")
    return StoredTensor(dtype=dtypes.pop(), shape=shape, chunks=chunks)


def _weights(masters: Mapping[str, StoredTensor], models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the weights of a model that the ranks divided, with its buffers."""
    whole = {name: each for name, each in models[0]["module"].items() if 0 not in each.shape}
    found = {**masters, **whole}
    for name, shape in _shapes([models[0]["frozen_param_shapes"] or {}])[0].items():
        if name not in found:
            parts = [each["frozen_param_fragments"][name] for each in models]
            found[name] = _cut(shape, _shares(parts, 0, prod(shape)))
    return found | {
        name: found[same] for name, same in models[0]["shared_params"].items() if name not in found
    }


def _step_of(optimizer: Mapping[str, Any]) -> Any:
    """Return the step of parameters that have none of their own."""
    base = optimizer.get("optimizer_state_dict")  # of stage 3
    if isinstance(base, dict):
        return base["state"][0].get("step", base["param_groups"][0].get("step"))
    return optimizer["param_groups"][0].get("step")


def _groups(base: Any, shapes: Sequence[_Shapes]) -> dict[str, Any]:
    """Return the groups of torch's optimizer, with names of parameters."""
    if not isinstance(base, dict):
        return {}
    groups = [
        {**group, "params": [name for index in group["params"] for name in shapes[index]]}
        for group in base["param_groups"]
    ]
    return {"param_groups": groups}
