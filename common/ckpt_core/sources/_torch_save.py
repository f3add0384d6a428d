"""Files of `torch.save`: tensors located, the rest as plain values.

Nothing is executed. What is accepted is what `torch.load(weights_only=True)` accepts of dense tensors and
plain values, numbers and arrays of NumPy, paths, namespaces, and configurations of omegaconf.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from pathlib import PurePath
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch

from ckpt_core._torch_internals import dtypes_by_storage_type, new_dtypes, storage_types_by_dtype
from ckpt_core.crew import run_all
from ckpt_core.dcp import read_record
from ckpt_core.errors import IncompatibleCheckpointError, UnsafeCheckpointError
from ckpt_core.formats.codec import damage
from ckpt_core.formats.consistency import MAX_DIMS
from ckpt_core.formats.pickles import PickleError, Sealed, read_pickle
from ckpt_core.formats.zips import Directory, ReadAt, ZipError, payload_offset, read_directory
from ckpt_core.sources._layout import OURS, Layout, Path, StoredChunk, StoredTensor
from ckpt_core.storage import ForeignFileError, RangeReader, Storage

Find: TypeAlias = Callable[[str, str], Any]
"""(module, name) in a pickle -> what stands for it; see `read_pickle`."""

_ZIP: Final = b"PK\3\4"
_BEFORE_ZIPS: Final = b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_TAR: Final = b"ustar"
_TAR_AT: Final = 257
_MOST_PICKLE_BYTES: Final = 1 << 28
_THREADS: Final = 16
_MOST_CHUNKS: Final = 1 << 16
"""Of an expanded tensor, whose elements share memory."""


class View(metaclass=Sealed):
    """Stand-in for a tensor: the arguments that rebuild it."""

    __slots__ = ("arguments",)
    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Any:
        """Take the arguments of `_rebuild_tensor_v2`."""
        found = object.__new__(cls)
        found.arguments = arguments
        return found


class _ViewOfDtype(View):
    """Stand-in for a tensor of `_rebuild_tensor_v3`, whose storage has no dtype."""

    __slots__ = ()


class _First(metaclass=Sealed):
    """Stand-in for a parameter: its first argument, the tensor."""

    def __new__(cls, value: Any, *_: Any) -> Any:
        return value


class _OfPlainType(metaclass=Sealed):
    """Stand-in for a tensor with attributes of its own, of a type that torch has."""

    def __new__(cls, rebuild: Any, kind: Any, arguments: Any, *_: Any) -> Any:
        if type(rebuild) is not Sealed or not issubclass(rebuild, View) or kind is not _PLAIN_TYPE:
            raise PickleError("a tensor of a type that is not torch's")
        return rebuild(*arguments)


class Mapped(dict[Any, Any], metaclass=Sealed):
    """Stand-in for a dict of another type; its attributes and its default are dropped."""

    __slots__ = ()

    def __init__(self, *given: Any) -> None:
        super().__init__(*(each for each in given if isinstance(each, dict | list)))

    def __setstate__(self, _: Any) -> None:
        pass


class Namespace(Mapped):
    """Stand-in for an object that is no more than its attributes."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        self.update(state)


class _Encoded(metaclass=Sealed):
    def __new__(cls, text: Any = "", *_: Any) -> Any:
        return text.encode("latin1") if isinstance(text, str) else bytes(memoryview(text))


class _PathText(metaclass=Sealed):
    def __new__(cls, *parts: Any) -> Any:
        return str(PurePath(*parts))


class _NumpyType(metaclass=Sealed):
    __slots__ = ("code", "order")
    code: str
    order: str

    def __new__(cls, code: str, *_: Any) -> Any:
        found = object.__new__(cls)
        found.code, found.order = code, "|"
        return found

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def values(self, content: bytes, shape: tuple[int, ...], *, is_fortran: bool = False) -> Any:
        """Return numbers as Python has them: one, or nested lists."""
        dtype = np.dtype(f"{self.order}{self.code}")
        if dtype.kind not in "biufc" or type(content) is not bytes:
            raise PickleError(f"NumPy values of dtype {self.code!r:.40}, which are no numbers")
        return np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C").tolist()


class _NumpyScalar(metaclass=Sealed):
    def __new__(cls, kind: _NumpyType, content: bytes) -> Any:
        return kind.values(content, ())


class _Valued(metaclass=Sealed):
    __slots__ = ("value",)
    value: Any

    def __new__(cls, *_: Any) -> Any:
        found = object.__new__(cls)
        found.value = None
        return found


class _NumpyArray(_Valued):
    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        self.value = kind.values(content, shape, is_fortran=bool(is_fortran))


class _Config(_Valued):
    """Stand-in for what omegaconf makes, as Hydra's configurations in hyperparameters."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        self.value = state.get("_content", state.get("_val"))


_OMEGACONF: Final = "omegaconf"
_PLAIN_TYPE: Final = "a tensor type of torch"
_TENSORS: Final = "torch._utils"
_ALLOWED: Final[dict[tuple[str, str], Any]] = {
    (_TENSORS, "_rebuild_tensor"): View,
    (_TENSORS, "_rebuild_tensor_v2"): View,
    (_TENSORS, "_rebuild_tensor_v3"): _ViewOfDtype,
    (_TENSORS, "_rebuild_parameter"): _First,
    (_TENSORS, "_rebuild_parameter_with_state"): _First,
    ("torch._tensor", "_rebuild_from_type_v2"): _OfPlainType,
    ("torch", "Tensor"): _PLAIN_TYPE,
    ("torch.nn.parameter", "Parameter"): _PLAIN_TYPE,
    ("torch.nn.parameter", "Buffer"): _PLAIN_TYPE,
    ("torch.storage", "UntypedStorage"): "UntypedStorage",
    ("torch", "Size"): tuple,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): _First,
    ("collections", "OrderedDict"): Mapped,
    ("collections", "Counter"): Mapped,
    ("collections", "defaultdict"): Mapped,
    ("argparse", "Namespace"): Namespace,
    ("types", "SimpleNamespace"): Namespace,
    ("typing", "Any"): "Any",
    ("_codecs", "encode"): _Encoded,
    **{
        (module, name): _PathText
        for module in ("pathlib", "pathlib._local")  # the latter by Python 3.13 alone
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): _NumpyType,
    **{
        (f"numpy.{core}.multiarray", name): each
        for core in ("core", "_core")
        for name, each in (("_reconstruct", _NumpyArray), ("scalar", _NumpyScalar))
    },
    **{
        (module, name): each
        for module in ("builtins", "__builtin__")
        for name, each in (
            ("set", set), ("frozenset", frozenset), ("complex", complex), ("bytearray", _Encoded),
            ("dict", "dict"), ("list", "list"), ("int", "int"), ("float", "float"), ("str", "str"),
            ("long", "int"), ("bool", "bool"), ("bytes", "bytes"),
        )
    },
}  # fmt: skip
_PLAIN: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), set, frozenset, torch.dtype, torch.device}
)


@cache
def _of_torch() -> Mapping[str, Any]:
    """Map the names of dtypes and types of storages to what stands for them."""
    dtypes = {str(each).removeprefix("torch."): each for each in (*storage_types_by_dtype(), *new_dtypes())}
    return {**dtypes, **{name: name for name in dtypes_by_storage_type()}}


def find_plain(module: str, name: str) -> Any:
    """Return what stands for a name of plain data or tensors; see `read_pickle`.

    Raises:
        UnsafeCheckpointError: it is another.
    """
    if (module, name) in _ALLOWED:
        return _ALLOWED[module, name]
    if module == "torch" and name in _of_torch():
        return _of_torch()[name]
    if module.partition(".")[0] == _OMEGACONF:
        return _Config
    raise UnsafeCheckpointError(
        f"it holds {module:.200}.{name:.200}, which is neither a dense tensor nor a plain value, and which "
        "only code could rebuild; none was executed. If you trust who wrote it, load it there with "
        "torch.load(..., weights_only=False), and torch.save the state_dicts in it"
    )


def read_tree(storage: Storage, directory: str, file: str, *, find: Find = find_plain) -> Any:
    """Return what `torch.save` wrote, with a `StoredTensor` for each tensor.

    Of other files None. Mappings become dicts, NumPy's values those of Python. The paths of chunks count from
    the directory. `find` returns what names stand for, and calls `find_plain` last.

    Raises:
        FileNotFoundError: no such file.
        CorruptCheckpointError: it is damaged.
        UnsafeCheckpointError: only code could rebuild what it holds.
        IncompatibleCheckpointError: it is of an old release of torch, or of another byte order.
    """
    place = f"{storage.url}/{directory}/{file}"
    try:
        with storage.open_ranges(f"{directory}/{file}") as reader:
            return _read(reader, file, find)
    except (ForeignFileError, IsADirectoryError) as error:
        raise damage(place, str(error.strerror)) from error
    except OSError:
        raise
    except (UnsafeCheckpointError, IncompatibleCheckpointError) as error:
        raise error.retold(f"{place}: {error}") from error
    except Exception as error:  # unchecked values raise nearly anything; the error names file and cause
        raise damage(place, f"not a whole file of torch.save: {error!s:.500}") from error


def _read(reader: RangeReader, file: str, find: Find) -> Any:
    def read_at(offset: int, size: int) -> bytes:
        buffer = bytearray(max(0, min(size, reader.size_bytes - offset)))
        reader.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    start = read_at(0, _TAR_AT + len(_TAR))
    if start.startswith(_BEFORE_ZIPS) or start[_TAR_AT:] == _TAR:
        raise IncompatibleCheckpointError(
            "it has the layout of torch before 1.6. Convert it: "
            f"torch.save(torch.load({file!r}, weights_only=True), 'new.pt')"
        )
    if not start.startswith(_ZIP):
        return None
    return _Zip(file, read_directory(read_at, reader.size_bytes), read_at).read(find)


@final
class _Zip:
    def __init__(self, file: str, directory: Directory, read_at: ReadAt) -> None:
        self._file = file
        self._directory = directory
        self._read_at = read_at
        self._offsets: dict[str, int] = {}

    def read(self, find: Find) -> Any:
        """Return its content; None if `torch.save` did not write it."""
        content = read_record(self._read_at, self._directory, "data.pkl", most_bytes=_MOST_PICKLE_BYTES)
        if content is None:
            return None
        order = read_record(self._read_at, self._directory, "byteorder") or b"little"
        if order != b"little":
            raise IncompatibleCheckpointError(
                f"its numbers are {order.decode('latin1')!r:.20}-endian; torch.load and torch.save it here"
            )
        keys: dict[str, None] = {}

        def storage(pid: Any) -> tuple[str, str, int]:
            kind, name, key, _, count = pid
            if kind != "storage" or not {str}.issuperset({type(name), type(key)}) or type(count) is not int:
                raise PickleError("a reference to something that is no storage")
            keys[key] = None
            return name, key, count

        tree = read_pickle(content, find, storage)
        run_all(self._locate, list(keys), _THREADS)
        return self._plain(tree)

    def _locate(self, key: str) -> None:
        record = self._directory.find(f"data/{key}")
        if record is None:
            raise ZipError(f"it lacks the storage {key!r:.20}")
        self._offsets[key] = payload_offset(self._read_at, self._directory, record)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, View):
            return self._stored(value)
        if isinstance(value, dict):
            return {self._plain(key): self._plain(each) for key, each in value.items()}
        if type(value) in {list, tuple}:
            return type(value)(map(self._plain, value))
        if isinstance(value, _Valued):
            return self._plain(value.value)
        if type(value) not in _PLAIN and value is not _Config:
            raise PickleError(f"it holds a {type(value).__name__} where a value should be")
        if isinstance(value, set | frozenset):
            return type(value)(map(self._plain, value))
        return _OMEGACONF if value is _Config else value

    def _stored(self, view: View) -> StoredTensor:
        (name, key, count), offset, shape, strides, *rest = view.arguments
        dtypes = dtypes_by_storage_type()
        untyped = isinstance(view, _ViewOfDtype)
        dtype, record = rest[2] if untyped else dtypes[name], self._directory.find(f"data/{key}")
        if any((rest[2 + untyped :] or [{}])[0].values()):
            raise IncompatibleCheckpointError(
                "a tensor is conjugated or negated lazily; save what resolve_conj() or resolve_neg() returns"
            )
        numbers = (count, offset, *shape, *strides)
        whole = count * (1 if untyped else dtype.itemsize)
        if not {int}.issuperset(map(type, numbers)) or min(numbers) < 0 or len(shape) > MAX_DIMS:
            raise PickleError("a tensor without a shape")
        if record is None or record.size_bytes != whole:
            raise PickleError(
                f"the storage {key!r:.20} does not have the {whole} bytes that its tensors need"
            )
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if prod(shape) and (offset + reach + 1) * dtype.itemsize > whole:
            raise PickleError(f"a tensor reaches beyond its storage {key!r:.20}")
        crc32 = record.crc32 if self._directory.has_checksums else None
        chunks = [
            StoredChunk(
                path=self._file,
                offset=self._offsets[key] + at * dtype.itemsize,
                offsets=offsets,
                sizes=sizes,
                strides=own,
                crc32=crc32 if own is None and prod(sizes) * dtype.itemsize == whole else None,
            )
            for at, offsets, sizes, own in _boxes(offset, tuple(shape), tuple(strides))
        ]
        return StoredTensor(dtype=dtype, shape=tuple(shape), chunks=chunks)


_Box: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]
"""First element in the storage; offsets and sizes in the tensor; strides, None if row-major."""


def _boxes(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[_Box]:
    """Cut a tensor where it is expanded: elements of a box have places of their own."""
    repeated = [
        not stride and size > 1 and 0 not in shape for size, stride in zip(shape, strides, strict=True)
    ]
    sizes = tuple(1 if cut else size for cut, size in zip(repeated, shape, strict=True))
    if prod(shape) > _MOST_CHUNKS * prod(sizes):
        raise IncompatibleCheckpointError(
            f"a tensor of shape {shape} is expanded: save what its contiguous() returns"
        )
    row_major, inner = True, 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        row_major = row_major and (size == 1 or stride == inner)
        inner *= size
    own = None if row_major or 0 in shape else strides
    for offsets in product(*(range(size if cut else 1) for cut, size in zip(repeated, shape, strict=True))):
        yield offset, offsets, sizes, own


def entries(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what is in a tree of `read_tree`, with its path in a checkpoint of ours."""
    is_element = bool(path) and isinstance(path[-1], int)
    if isinstance(tree, dict) and (tree or not is_element):  # a list must keep its length
        for key, each in tree.items():
            yield from entries(each, (*path, str(key)))
    elif isinstance(tree, list | tuple) and _is_container(tree):
        for index, each in enumerate(tree):
            yield from entries(each, (*path, index))
    else:
        yield path, tree


def _is_container(tree: Any) -> bool:
    """Return whether a checkpoint descends a value: for a tensor or a dict in it.

    A tuple is one value, but for the tensors in it.
    """
    if isinstance(tree, tuple):
        return any(map(_holds_tensor, tree))
    if isinstance(tree, list):
        return any(isinstance(each, StoredTensor) or _is_container(each) for each in tree)
    return isinstance(tree, dict) and bool(tree)


def _holds_tensor(tree: Any) -> bool:
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return isinstance(tree, StoredTensor) or any(map(_holds_tensor, inner))


def layout_of(kind: str, items: Mapping[str, Any], *, step: Any = None) -> Layout:
    """Return the layout of items, each a tree of `read_tree`.

    Raises:
        IncompatibleCheckpointError: two entries would have one name.
    """
    tensors: dict[Path, StoredTensor] = {}
    values: dict[Path, Any] = {}
    for path, each in entries(items):
        if path in tensors or path in values:
            raise IncompatibleCheckpointError(
                f"two entries of {kind} are called {'.'.join(map(str, path))!r:.200}"
            )
        if isinstance(each, StoredTensor):
            tensors[path] = each
        else:
            values[path] = each
    return Layout(kind=kind, tensors=tensors, values=values, step=step if type(step) is int else None)


_NAMES: Final = {
    "model": ("model", "state_dict", "model_state_dict", "model_state", "net", "weights"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optimizer_state", "optim", "opt"),
    "scheduler": ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict"),
}
"""Items of ours, and what others call them; the first that is there."""
_STEPS: Final = ("global_step", "step", "step_count", "iter_num")
_EXTRA: Final = "_extra_state"
_PACKED: Final = frozenset({"state", "param_groups"})
_COMPILED: Final = "_orig_mod."
_PARALLEL: Final = "module."


def items_of(tree: Mapping[Any, Any]) -> dict[str, Any]:
    if all(isinstance(each, StoredTensor) or str(key).endswith(_EXTRA) for key, each in tree.items()):
        return {"model": bare_names(tree)}
    if tree.keys() >= _PACKED:
        return {"optimizer": tree}
    items = {
        name: next((key for key in keys if isinstance(tree.get(key), dict)), None)
        for name, keys in _NAMES.items()
    }
    named = {name: tree[key] for name, key in items.items() if key is not None}
    if "model" in named:
        named["model"] = bare_names(named["model"])
    return {str(key): each for key, each in tree.items() if key not in items.values()} | named


def one_or_numbered(trees: Sequence[Any]) -> Any:
    """Return the only one, or all by number, as a `TrainState` names several."""
    return trees[0] if len(trees) == 1 else {str(number): each for number, each in enumerate(trees)}


def bare_names(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Name a model's entries without `torch.compile` and DistributedDataParallel."""
    names = {key: str(key).replace(_COMPILED, "") for key in state}
    prefix = _PARALLEL if all(name.startswith(_PARALLEL) for name in names.values()) else ""
    return {names[key].removeprefix(prefix): each for key, each in state.items()}


_OF_RANK: Final = re.compile(r"(?P<item>.+)_(?P<rank>\d+)\.pt")
_OF_SHARDS: Final = "metadata.pkl"


def find_rank_files(storage: Storage, directory: str, files: Sequence[str]) -> Layout | None:
    """Describe a directory of torch_checkpointing: a file for each item and rank."""
    found = [match for match in map(_OF_RANK.fullmatch, files) if match]
    if not found or len(found) + (_OF_SHARDS in files) != len(files):
        return None
    kind = "a checkpoint of torch_checkpointing"
    if other := next((match[0] for match in found if int(match["rank"])), None):
        raise IncompatibleCheckpointError(
            f"{storage.url}/{directory} is {kind} that several ranks wrote ({other}), which is not read "
            "here: use its CheckpointManager.load, and save what it loads by torch.distributed.checkpoint"
        )
    tree = {match["item"]: read_tree(storage, directory, match[0]) for match in found}
    if None in tree.values():
        return None
    return layout_of(kind, items_of(tree), step=next((tree[key] for key in _STEPS if key in tree), None))


_OF_LIGHTNING: Final = {"optimizer_states": "optimizer", "lr_schedulers": "scheduler"}
"""Lists in a checkpoint of Lightning, and what they are in ours."""
_LIGHTNING: Final = "pytorch-lightning_version"


def find_torch_save(storage: Storage, directory: str, file: str) -> Layout | None:
    """Describe a file of `torch.save`: weights, or the state of a training."""
    if not file:
        return None
    try:
        tree = read_tree(storage, directory, file)
    except FileNotFoundError:
        return None
    if tree is None:
        return None
    if not isinstance(tree, dict):
        raise IncompatibleCheckpointError(
            f"{storage.url}/{directory}/{file} holds a {type(tree).__name__}, not a dict by names: save "
            "model.state_dict(), or a dict of state_dicts"
        )
    if isinstance(ours := tree.get(OURS), dict) and isinstance(ours.get("state"), dict):
        found = layout_of("a file made of a checkpoint of ours", ours["state"], step=ours.get("step"))
        files = entries(ours.get("files", {}))
        return replace(
            found, files={str(path[0]): str(text).encode(errors="replace") for path, text in files if path}
        )
    if _LIGHTNING in tree and isinstance(tree.get("state_dict"), dict):
        items = {_OF_LIGHTNING[key]: one_or_numbered(tree[key]) for key in _OF_LIGHTNING if tree.get(key)}
        items["model"] = bare_names(tree["state_dict"])
        rest = {str(key): each for key, each in tree.items() if key not in {"state_dict", *_OF_LIGHTNING}}
        return layout_of("a checkpoint of Lightning", rest | items, step=tree.get("global_step"))
    step = next((tree[key] for key in _STEPS if key in tree), None)
    return layout_of("a file of torch.save", items_of(tree), step=step)
