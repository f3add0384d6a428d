"""Weights in safetensors: one file, a Hugging Face folder, an adapter of PEFT.

Source of the format: the README of huggingface/safetensors, and what its own reader refuses. Of the folders:
`save_pretrained` of transformers, diffusers and PEFT.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple, final

import torch

from ckpt_core.errors import ConfigError, CorruptCheckpointError, IncompatibleCheckpointError, damaged
from ckpt_core.formats.codec import count, relative_paths
from ckpt_core.sources._layout import Layout, Path, StoredChunk, StoredTensor
from ckpt_core.storage import ForeignFileError, Storage, read_small

_SUFFIX: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_PREFERRED: Final = ("model", "diffusion_pytorch_model")
"""Base names that loaders take where a folder has several."""
_SHARD: Final = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_MOST_HEADER_BYTES: Final = 100_000_000
_MOST_SHOWN: Final = 3
DTYPES: Final = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip

_ADAPTER: Final = "adapter_model"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_ADAPTER_NAME: Final = "default"
MAGNITUDE: Final = "lora_magnitude_vector"
"""A parameter of DoRA, which is a module in memory."""
_STARTS: Final = {"ADALORA": "lora_", "LOHA": "hada_", "VERA": "vera_lambda_", "PVERA": "pvera_lambda_"}
"""How the parameters of a kind of adapter begin; of others, with the name of the kind."""


class StoredRange(NamedTuple):
    """A tensor in a file of safetensors: its place counts from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def as_tensor(self, file: str, offsets: tuple[int, ...] | None = None) -> StoredTensor:
        """Return it as one chunk of that file, which may be a box of a larger tensor."""
        start = (0,) * len(self.shape) if offsets is None else offsets
        chunk = StoredChunk(path=file, offset=self.offset, offsets=start, sizes=self.shape)
        return StoredTensor(dtype=self.dtype, shape=self.shape, chunks=[chunk])


def find_weights(storage: Storage, directory: str, file: str) -> Layout | None:
    """Describe what one file, or one index, holds as the item `model`."""
    for suffix in (_INDEX, _SUFFIX):
        if file.endswith(suffix):
            return _WeightSets(storage, directory).layout(file.removesuffix(suffix), {file})
    return None


def find_safetensors(storage: Storage, directory: str, files: Iterable[str]) -> Layout | None:
    """Describe the weights of a folder as the item `model`."""
    folder = _WeightSets(storage, directory)
    names = {name for name in files if name.endswith((_SUFFIX, _INDEX))}
    bases = {_base_of(name) for name in names}
    if not bases:
        return None
    if len(bases) > 1:
        bases = {next((each for each in _PREFERRED if each in bases), "")}
    if bases == {""}:
        raise ConfigError(
            f"{folder.url} holds several sets of weights ({', '.join(sorted(names)[:_MOST_SHOWN])}, …): name "
            "the file, or the index, of one"
        )
    return folder.layout(bases.pop(), names)


def read_header(storage: Storage, directory: str, file: str) -> tuple[dict[str, StoredRange], dict[str, Any]]:
    """Read and check the header of a file: its tensors, and its metadata.

    Raises:
        CorruptCheckpointError: it is missing or damaged, or says what its bytes cannot be.
        IncompatibleCheckpointError: a dtype is unknown.
    """
    try:
        with storage.open(f"{directory}/{file}") as stream:
            size = storage.size(f"{directory}/{file}")
            begin = 8 + int.from_bytes(stream.read(8), "little")
            if not 8 < begin <= size:
                raise ValueError(f"its header would be {begin - 8} bytes long, of the {size} of the file")
            if begin - 8 > _MOST_HEADER_BYTES:
                raise ValueError(f"its header is {begin - 8} bytes long, and may be {_MOST_HEADER_BYTES}")
            header = _parsed(stream.read(begin - 8))
        metadata = header.pop("__metadata__", {})
        if type(metadata) is not dict:
            raise ValueError("its __metadata__ is no mapping")
        return _ranges(header, begin, size), metadata
    except FileNotFoundError:
        raise damaged(f"{storage.url}/{directory}", file, "missing") from None
    except (ForeignFileError, IsADirectoryError) as error:
        raise damaged(f"{storage.url}/{directory}", file, str(error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise damaged(f"{storage.url}/{directory}", file, f"is no file of safetensors: {error}") from error
    except IncompatibleCheckpointError as error:
        raise error.retold(f"{storage.url}/{directory}/{file}: {error}") from None


def _ranges(header: Mapping[str, Any], begin: int, size: int) -> dict[str, StoredRange]:
    """Check that the tensors fill the file one after another, as the format demands."""
    found = {name: _range(name, entry, begin) for name, entry in header.items()}
    end = begin
    for name, each in sorted(found.items(), key=lambda pair: (pair[1].offset, pair[1].size_bytes)):
        if each.offset != end:
            what = "overlaps the one before" if each.offset < end else "leaves a gap before it"
            raise ValueError(f"{name!r:.200} {what}")
        end += each.size_bytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, the file at {size}")
    return found


def _range(name: str, entry: Any, begin: int) -> StoredRange:
    name.encode()  # half of a surrogate pair is no text
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r:.200} is not described by dtype, shape and data_offsets")
    code, lengths, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(lengths) is not list or type(offsets) is not list or len(offsets) != len(("start", "stop")):
        raise ValueError(f"{name!r:.200} has no shape, or no place")
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise IncompatibleCheckpointError(f"{name!r:.200} has the dtype {code!r:.40}, which is not read")
    shape = tuple(count(each, "shape") for each in lengths)
    start, stop = (count(each, "data_offsets") for each in offsets)
    found = StoredRange(dtype, shape, begin + start)
    if stop - start != found.size_bytes:
        raise ValueError(f"{name!r:.200} has {stop - start} bytes, {code} of shape {shape!s:.200} has others")
    return found


@final
class _WeightSets:
    """A folder with sets of weights, each of a file, or of an index and shards."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage, self._directory = storage, directory
        self.url = f"{storage.url}/{directory}"

    def layout(self, base: str, names: Iterable[str]) -> Layout:
        own = {name for name in names if _base_of(name) == base or name == f"{base}{_SUFFIX}"}
        index = f"{base}{_INDEX}"
        if f"{base}{_SUFFIX}" in own:
            kind, listed, files = "a file of safetensors", {}, [f"{base}{_SUFFIX}"]
        elif index in own:
            listed = self._index(index)
            kind, files = "a folder of Hugging Face weights", sorted(set(listed.values()))
        else:
            kind, listed, files = "a folder of shards without an index", {}, self._shards(own)
        tensors = self._tensors(files)
        for name, file in listed.items():
            if name not in tensors or tensors[name].chunks[0].path != file:
                raise self._damaged(index, f"says that {name!r:.200} is in {file}, where it is not")
        if base == _ADAPTER:
            live = self._live_names(tensors)
            return Layout(
                kind="an adapter of PEFT", tensors={live[name]: each for name, each in tensors.items()}
            )
        return Layout(kind=kind, tensors={("model", name): each for name, each in tensors.items()})

    def _tensors(self, files: Sequence[str]) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for file in files:
            for name, each in read_header(self._storage, self._directory, file)[0].items():
                if name in found:
                    other = found[name].chunks[0].path
                    raise self._damaged(file, f"{name!r:.200} is in it, and in {other}, too")
                found[name] = each.as_tensor(file)
        return found

    def _index(self, index: str) -> dict[str, str]:
        found = read_json(self._storage, self._directory, index).get("weight_map")
        if type(found) is not dict or not found:
            raise self._damaged(index, "is no index: it has no weight_map")
        try:
            files = relative_paths([*found.values()])
        except ValueError as error:
            raise self._damaged(index, f"is no index: {error}") from error
        if any("/" in file or not file.endswith(_SUFFIX) for file in files):
            raise self._damaged(index, "names what is no file of safetensors beside it")
        return found

    def _shards(self, names: Iterable[str]) -> list[str]:
        found = {name: match for name in sorted(names) if (match := _SHARD.fullmatch(name))}
        counts = {int(match["count"]) for match in found.values()}
        numbers = {int(match["number"]) for match in found.values()}
        if len(counts) != 1 or numbers != set(range(1, 1 + max(counts))):
            raise self._damaged(
                next(iter(found), ""),
                f"one of {len(found)} shards that are not all there: an index is missing",
            )
        return [*found]

    def _live_names(self, names: Iterable[str]) -> dict[str, Path]:
        """Return the paths that an adapter's tensors have in a checkpoint of a live model.

        PEFT leaves out the adapter's name, which is `default` where one was loaded or made without a name.
        """
        config = read_json(self._storage, self._directory, _ADAPTER_CONFIG)
        kind, saved = config.get("peft_type"), config.get("modules_to_save") or []
        if type(kind) is not str or type(saved) is not list or not {str}.issuperset(map(type, saved)):
            raise self._damaged(_ADAPTER_CONFIG, "is no configuration of PEFT")
        start = start_of(kind)
        return {name: ("model", _live_name(name, start, saved)) for name in names}

    def _damaged(self, file: str, problem: str) -> CorruptCheckpointError:
        return damaged(self.url, file, problem)


def read_json(storage: Storage, directory: str, file: str) -> dict[str, Any]:
    """Read a small file that holds a JSON object, in which no name comes twice.

    Raises:
        CorruptCheckpointError: it is missing, or holds none.
    """
    try:
        return _parsed(read_small(storage, f"{directory}/{file}", _MOST_HEADER_BYTES))
    except FileNotFoundError:
        raise damaged(f"{storage.url}/{directory}", file, "missing") from None
    except (ValueError, RecursionError) as error:
        raise damaged(f"{storage.url}/{directory}", file, f"cannot be read: {error}") from error


def start_of(kind: str) -> str:
    """Return how the names of parameters of a kind of adapter begin."""
    return _STARTS.get(kind, f"{kind.lower()}_")


def _live_name(name: str, start: str, saved: Sequence[str]) -> str:
    parts = name.split(".")
    for place in range(len(parts) - 1, -1, -1):
        if parts[place].startswith(start):
            parts.insert(place + 1, _ADAPTER_NAME)
            return ".".join(parts) + (".weight" if parts[place] == MAGNITUDE else "")
    for place in range(1, len(parts)):
        module = ".".join(parts[:place])
        if module.endswith(tuple(saved)):
            return ".".join([module, "modules_to_save", _ADAPTER_NAME, *parts[place:]])
    return name


def _base_of(name: str) -> str:
    if name.endswith(_INDEX):
        return name.removesuffix(_INDEX)
    shard = _SHARD.fullmatch(name)
    return name.removesuffix(_SUFFIX) if shard is None else shard["base"]


def _parsed(content: bytes) -> dict[str, Any]:

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name comes twice")
        return found

    found = json.loads(content, object_pairs_hook=once)
    if type(found) is not dict:
        raise ValueError("it is no JSON object")
    return found
