"""A dry run of torch's `weights_only` unpickler, with a budget of time and memory.

That unpickler executes no foreign code, but it hashes keys of any nesting, and calls `bytearray` and the like
with any number. Here every class is a stand-in, and every hash, copy and allocation is charged to a budget
that grows with the size of the pickle; torch never reads a pickle that exceeds it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from math import prod
from typing import Any, Final, final

from typing_extensions import override

from ckpt_core.formats.pickles import PickleError, sanitize_pickle

_MOST_LEVELS: Final = 200
_SIZES: Final = {
    "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "LongStorage": 8, "IntStorage": 4,
    "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1, "BoolStorage": 1, "BFloat16Storage": 2,
    "ComplexDoubleStorage": 16, "ComplexFloatStorage": 8, "QInt8Storage": 1, "QInt32Storage": 4,
    "QUInt8Storage": 1, "QUInt4x2Storage": 1, "QUInt2x4Storage": 1, "UntypedStorage": 1,
}  # fmt: skip
_HASHES_ARGUMENTS: Final = frozenset({"builtins.set", "collections.Counter", "collections.OrderedDict"})


def dry_run_unpickle(content: bytes, storages: Mapping[str, int], size_bytes: int) -> None:
    """Dry-run the `data.pkl` of a torch zip.

    Args:
        content: the pickle.
        storages: key of a storage -> size in bytes of its record.
        size_bytes: of the whole zip; no load needs a larger allocation.

    Raises:
        PickleError: a load would take too much time or memory, or read outside of a record.
    """
    _DryRun(content, storages, size_bytes).load()


class _Tuple(tuple[Any, ...]):
    """A tuple whose hash is charged by the number of values hashed."""

    run: _DryRun
    weight: int
    levels: int

    def __hash__(self) -> int:
        self.run.charge(self.weight)
        return id(self)


class _Named(dict[Any, Any]):
    """Stand-in for a class or function and for its results; accepts items."""

    run: _DryRun
    path: str
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __new__(cls, *args: Any, **_: Any) -> Any:
        return cls.run.call(cls, args)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __call__(self, *_: Any) -> _Named:
        return self

    def __setstate__(self, state: Any) -> None:
        """Accept a state; torch makes a mapping of it, which hashes each pair's first."""
        if isinstance(state, (list, tuple)):
            for pair in state:
                if isinstance(pair, (list, tuple)) and pair and isinstance(pair[0], tuple):
                    hash(pair[0])

    def append(self, _: Any) -> None:
        """Accept an item, as a list would."""

    def extend(self, _: Any) -> None:
        """Accept items, as a list would."""


def _makes_new(path: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call takes memory or time out of proportion to its arguments."""
    sizes = any(isinstance(value, (int, tuple)) for value in args)
    if path == "builtins.bytearray" or (path.startswith("torch.") and path.endswith(("Tensor", "Storage"))):
        return sizes
    # Bytes are pickled as Latin-1; some other encodings take quadratic time.
    return path == "_codecs.encode" and args[1:] != ("latin1",)


@final
class _DryRun(pickle.Unpickler):  # noqa: S301 - no name in it is ever looked up
    def __init__(self, content: bytes, storages: Mapping[str, int], size_bytes: int) -> None:
        super().__init__(io.BytesIO(sanitize_pickle(content, persistent_ids=True)), encoding="bytes")
        self._storages = storages
        self._size_bytes = size_bytes
        self._budget = 16 * len(content) + 100_000

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        fields = {"run": self, "path": f"{module_name}.{global_name}"}
        return type("_Named", (_Named,), fields)

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        if type(pid) is tuple:
            return self._weigh(pid)
        self._check_storage(pid)
        return self._named()

    def charge(self, cost: int) -> None:
        """Charge work or memory, in values or bytes."""
        self._budget -= cost
        if self._budget < 0:
            raise PickleError("loading it would take absurdly long; it may be an attack")

    def call(self, named: type[_Named], args: tuple[Any, ...]) -> Any:
        """Return the result of a call of the named class or function, if it is harmless."""
        path = named.path
        for value in args:
            if isinstance(value, (str, bytes, list, dict, tuple)):
                self.charge(len(value))
        if path in _HASHES_ARGUMENTS and args:
            self._hash(path, args[0])
        elif path == "torch._tensor._rebuild_from_type_v2":
            inner, _, inner_args, *_ = args
            return self.call(inner, tuple(inner_args))
        elif _makes_new(path, args):
            raise PickleError(f"it makes a new {path:.80}, which torch.save never writes")
        elif path == "torch._utils._rebuild_qtensor":
            self._check_shape(args)
        return self._weigh(tuple(args[0])) if path == "torch.Size" and args else self._named(named)

    def _named(self, named: type[_Named] = _Named) -> _Named:
        made: _Named = dict.__new__(named)
        return made

    def _weigh(self, values: tuple[Any, ...]) -> _Tuple:
        weight, levels = 1, 0
        for value in values:
            while type(value) is tuple and len(value) == 1:  # a wrapper of another, without a weight
                value = value[0]  # noqa: PLW2901
            if isinstance(value, _Tuple):
                weight += value.weight
                levels = max(levels, value.levels)
            else:
                weight += 1
        if levels >= _MOST_LEVELS:
            raise PickleError(f"tuples in tuples, more than {_MOST_LEVELS} deep; it may be an attack")
        weighed = _Tuple(values)
        weighed.run, weighed.weight, weighed.levels = self, weight, levels + 1
        return weighed

    def _hash(self, path: str, items: Any) -> None:
        pairs = path == "collections.OrderedDict" and not isinstance(items, dict)
        for item in items:
            hash(item[0] if pairs else item)

    def _check_shape(self, args: tuple[Any, ...]) -> None:
        shape = args[2] if len(args) > 2 else ()
        if not all(type(length) is int for length in shape) or prod(shape) > self._size_bytes:
            raise PickleError("a quantised tensor larger than its data")

    def _check_storage(self, pid: Any) -> None:
        """Refuse a storage whose size differs from its record's: torch would not check it."""
        kind, storage, key, _, count = pid
        path = storage.path if isinstance(storage, type) and issubclass(storage, _Named) else ""
        itemsize = _SIZES.get(path.rpartition(".")[2])
        if kind != "storage" or itemsize is None or type(key) is not str or type(count) is not int:
            raise PickleError("a reference to something that is no storage")
        if self._storages.get(key) != count * itemsize:
            raise PickleError(
                f"storage {key!r:.20} should have {count * itemsize} bytes and has {self._storages.get(key)}"
            )
