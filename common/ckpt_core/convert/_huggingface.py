"""Weights in the folders that transformers and PEFT read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias, final

import torch

from ckpt_core.convert._adapters import AdaptedModel, base_name, has_adapters
from ckpt_core.convert._fill import size_of
from ckpt_core.convert._hub_form import HubForm, StateView, hub_form
from ckpt_core.convert._laid_out import Computed, Conversion, ExportOptions, OutFile, Place, Wanted
from ckpt_core.convert._weights import Weights, unwrapped
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError, first_of
from ckpt_core.loading import CommittedFiles, LocatedTensor
from ckpt_core.sources import DTYPES
from ckpt_core.state import facts_of, recorded_base

_CONFIG: Final = "config.json"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_BESIDE: Final = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model",
    "*.tiktoken", "*.jinja", "chat_template*", "*processor_config.json", "normalizer.json",
    "generation_config.json",
)  # fmt: skip
_NEWER: Final = frozenset({"F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
"""Codes that not every reader of safetensors knows."""
_CODES: Final = {dtype: code for code, dtype in DTYPES.items() if code not in _NEWER}
_logger = logger_of(__name__)
_FLOATING: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_EMBEDDINGS: Final = ("embed", "shared", "wte")
_MOST_SHOWN: Final = 3
_Tensors: TypeAlias = Mapping[str, LocatedTensor]
_Piece: TypeAlias = Wanted | Computed


def hugging_face(source: Place, options: ExportOptions) -> Conversion:
    """Lay out a folder that `from_pretrained` of transformers, or of PEFT, reads.

    Raises:
        ConfigError: options that do not fit what is there.
        IncompatibleCheckpointError: the configuration is of another model than the weights.
        CheckpointError: the source cannot be read.
    """
    weights = Weights.of(source, options)
    like = None if options.like is None else (*options.like[:2], "")
    folders = [*([] if like is None else [CommittedFiles(*like[:2], None)]), weights.files]
    adapted = _adapted(weights, folders, options)
    if adapted is not None and options.adapters == "keep":
        own = {name: Wanted(each) for name, each in adapted.own.items()}
        pieces = _cast(own, weights.tensors, options.dtype)
        texts = {**_beside(folders), _ADAPTER_CONFIG: _text(adapted.config)}
        return _conversion(weights, weights.tensors, texts, {"adapter_model.safetensors": pieces})
    if (config := _json(folders, _CONFIG)) is None:
        _logger.warning(
            "%s has no config.json: weights alone are written, under the names of the model, tied ones "
            "under each. For from_pretrained give like= (--like), a folder with the configuration",
            weights.files.url,
        )
    form = None if config is None else hub_form(config)
    names = (
        unwrapped(weights, form.shapes if form else _weights_in(like)) if adapted is None else adapted.base
    )
    base = _base(weights, names, like)
    model = _Model(
        names=names,
        tensors=weights.tensors if base is None else {**base.tensors, **weights.tensors},
        base={} if base is None else base.names,
        adapted=adapted,
    )
    if form is None:
        found = model.as_it_is(_weights_in(like), config or {})
    else:
        found = model.in_form(form, partial=bool(options.include))
    pieces = _cast(found, model.tensors, options.dtype)
    texts = _beside(folders)
    if config is not None:
        texts[_CONFIG] = _text(_with_dtype(config, pieces, model.tensors, deep=options.dtype is not None))
    return _conversion(weights, model.tensors, texts, _shards(pieces, model.tensors, options.shard_bytes))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """The tensors that make up a model.

    Attributes:
        names: in the state of the model -> in `tensors`.
        tensors: of the checkpoint and of the base.
        base: names in the files of the base -> in `tensors`.
        adapted: what is merged into them.
    """

    names: Mapping[str, str]
    tensors: _Tensors
    base: Mapping[str, str]
    adapted: AdaptedModel | None

    def in_form(self, form: HubForm, *, partial: bool) -> dict[str, _Piece]:
        """Return the tensors of the files that transformers would write.

        Raises:
            IncompatibleCheckpointError: there are others, or too few unless that is wanted.
        """
        if len(self.names.keys() & form.views.keys()) > len(self.names.keys() & form.shapes.keys()):
            return {name: Wanted(each) for name, each in self.names.items()}  # they come from such files
        found: dict[str, _Piece] = {}
        problems: list[str] = []
        for target, view in form.views.items():
            alike = (view.name, *form.twins.get(view.name, ()))
            own = [self.names[name] for name in alike if name in self.names]
            if not own and target not in self.base:
                problems += [] if partial else [f"{target} is missing"]
                continue
            expected = form.shapes[view.name] if own else view.shape
            place = own[0] if own else self.base[target]
            if (shape := self.tensors[place].shape) != expected:
                problems.append(f"{target} has shape {list(shape)}, {list(expected)} is expected")
            elif len({str(self.tensors[each].checksums) for each in own}) > 1:
                problems.append(f"{' and '.join(alike)} are one tensor there, and differ here")
            else:
                found[target] = self._made(place, alike, view if own else None)
        problems += [f"{name} is not in that model" for name in self.names if name not in form.shapes]
        if problems:
            raise IncompatibleCheckpointError(
                f"config.json describes another model: {first_of(problems, _MOST_SHOWN, '; ')}. Give the "
                "folder of the right one (like=, --like), or choose tensors (include=, --include)"
            )
        return found

    def as_it_is(self, known: Collection[str], config: Mapping[str, Any]) -> dict[str, _Piece]:
        """Return the tensors of a model that transformers does not know, tied ones once."""
        names = {**self.base, **self.names}
        found = {name: self._made(each, (name,), None) for name, each in names.items()}
        if not known and not config.get("tie_word_embeddings"):
            return found
        alike: dict[str, list[str]] = {}
        for name, each in names.items():
            tensor = self.tensors[each]
            is_tied = name in known or known or tensor.shape[:1] == (config.get("vocab_size"),)
            if is_tied and len(tensor.shape) > 1 and tensor.checksums is not None:
                alike.setdefault(f"{tensor.form} {sorted(tensor.checksums.items())}", []).append(name)
        for same in alike.values():
            embeds = {name: any(each in name for each in _EMBEDDINGS) for name in same}
            first = min(same, key=lambda name: (name not in known, not embeds[name], name))
            for name in same:
                if name != first and name not in known:
                    del found[name]
        return found

    def _made(self, place: str, alike: Sequence[str], view: StateView | None) -> _Piece:
        """Return a tensor with what is merged into it; of a view of it, that part."""
        tensor, factors = self.tensors[place], {} if self.adapted is None else self.adapted.factors
        merged = next((name for name in alike if name in factors), None)
        is_whole = view is None or (view.shape == tensor.shape and view.is_contiguous)
        if merged is None and is_whole:
            return Wanted(place)
        piece = Computed.of(place, tensor.shape, tensor.dtype)
        if merged is not None and self.adapted is not None:
            piece = self.adapted.merged(merged, piece, self.tensors)
        return piece if is_whole or view is None else piece.part(view.shape, view.strides, view.offset)


def _adapted(
    weights: Weights, folders: Sequence[CommittedFiles], options: ExportOptions
) -> AdaptedModel | None:
    """Return the model with its adapter, if it has one."""
    url = weights.files.url
    if not has_adapters(weights.names):
        if options.adapters is not None:
            raise ConfigError(f"{url} has no adapters of PEFT, which adapters={options.adapters!r} is for")
        return None
    if options.adapters is None:
        raise ConfigError(
            f'{url} holds adapters of PEFT: say what becomes of them, adapters="keep" (--adapters) to write '
            'them alone, or adapters="merge" (--merge-adapters) to write the model with them'
        )
    config = _json(reversed(folders), _ADAPTER_CONFIG)
    if config is None:
        raise ConfigError(
            f"{url} has no {_ADAPTER_CONFIG}, which says what the adapters are: give a folder that has it "
            "(like=, --like), such as `model.peft_config['default'].save_pretrained(DIR)` writes"
        )
    found = AdaptedModel.of(weights.names, config)
    if options.adapters == "merge":
        found.require_plain()
    return found


def _base(weights: Weights, own: Collection[str], like: Place | None) -> Weights | None:
    """Return the weights that were not saved; None if all were.

    Raises:
        ConfigError: they are needed, and no folder has them.
        IncompatibleCheckpointError: those of the folder are others.
    """
    source, facts = recorded_base(weights.shared)
    needed = {base_name(name): fact for name, fact in facts.items() if base_name(name) not in own}
    if not needed:
        return None
    if like is None or not _weights_in(like):
        raise ConfigError(
            f"{weights.files.url} lacks what was not trained, such as {min(needed)}: give the folder of the "
            f"base, {source or 'whose name was not saved'} (like=, --like); adapters alone need none "
            '(adapters="keep", --adapters)'
        )
    found = Weights.of(like, ExportOptions())
    for name in needed.keys() & found.names.keys():
        tensor = found.tensors[found.names[name]]
        whole = tensor.read(lambda _: None).view(tensor.shape)
        if facts_of({name: whole})[name] != needed[name]:
            raise IncompatibleCheckpointError(
                f"{found.files.url} is not the base that {weights.files.url} was trained on: {name} differs"
            )
    return replace(
        found,
        tensors={f"base: {name}": each for name, each in found.tensors.items()},
        names={name: f"base: {each}" for name, each in found.names.items()},
    )


def _cast(pieces: Mapping[str, _Piece], tensors: _Tensors, dtype: torch.dtype | None) -> dict[str, _Piece]:
    """Return tensors of another dtype, but for those that are no floating numbers."""
    if dtype is None:
        return dict(pieces)
    return {
        name: piece
        if dtype_of(piece, tensors) not in _FLOATING
        else Wanted(piece.name, dtype)
        if isinstance(piece, Wanted)
        else piece.cast(dtype)
        for name, piece in pieces.items()
    }


def _with_dtype(
    config: Mapping[str, Any], pieces: Mapping[str, _Piece], tensors: _Tensors, *, deep: bool
) -> Any:
    """Return a configuration that says which dtype most of the weights have."""
    sizes = Counter[torch.dtype]()
    for piece in pieces.values():
        if (dtype := dtype_of(piece, tensors)) in _FLOATING:
            sizes[dtype] += size_of(piece, tensors)
    name = str(max(sizes, key=lambda each: sizes[each], default=torch.float32)).removeprefix("torch.")
    keys = {"dtype", "torch_dtype"} & config.keys() or {"dtype"}
    inner = {
        key: {**value, **dict.fromkeys({"dtype", "torch_dtype"} & value.keys(), name)}
        for key, value in config.items()
        if deep and isinstance(value, dict)
    }
    return {**config, **inner, **dict.fromkeys(keys, name)}


def _shards(
    pieces: Mapping[str, _Piece], tensors: _Tensors, most_bytes: int
) -> dict[str, Mapping[str, _Piece] | bytes]:
    """Divide tensors into files of a size, with an index of several, last."""
    shards: list[dict[str, _Piece]] = [{}]
    filled = total = 0
    for name, piece in pieces.items():
        size = size_of(piece, tensors)
        if shards[-1] and filled + size > most_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = piece
        filled, total = filled + size, total + size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    found = {
        f"model-{place:05d}-of-{len(shards):05d}.safetensors": each for place, each in enumerate(shards, 1)
    }
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, shard in found.items() for name in shard},
    }
    return {**found, "model.safetensors.index.json": _text(index)}


def safetensors_file(path: str, pieces: Mapping[str, _Piece], tensors: _Tensors) -> OutFile:
    """Lay out a file of safetensors.

    Raises:
        IncompatibleCheckpointError: the format has no name for a dtype.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # The widest first, so that each is aligned.
    ordered = sorted(pieces, key=lambda name: -dtype_of(pieces[name], tensors).itemsize)
    start = 0
    for name in ordered:
        piece, dtype = pieces[name], dtype_of(pieces[name], tensors)
        if dtype not in _CODES:
            raise IncompatibleCheckpointError(f"safetensors has no dtype for {name!r:.200}, which is {dtype}")
        stop = start + size_of(piece, tensors)
        shape = tensors[piece.name].shape if isinstance(piece, Wanted) else piece.shape
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return OutFile(
        path=path, pieces=[len(content).to_bytes(8, "little") + content, *(pieces[n] for n in ordered)]
    )


def dtype_of(piece: _Piece, tensors: _Tensors) -> torch.dtype:
    """Return the dtype that a tensor will have."""
    return piece.dtype or tensors[piece.name].dtype if isinstance(piece, Wanted) else piece.dtype


def _conversion(
    weights: Weights,
    tensors: _Tensors,
    files: Mapping[str, bytes],
    data: Mapping[str, Mapping[str, _Piece] | bytes],
) -> Conversion:
    return Conversion(
        files=[
            OutFile(path=path, pieces=[each])
            if isinstance(each, bytes)
            else safetensors_file(path, each, tensors)
            for path, each in {**files, **data}.items()
        ],
        tensors=tensors,
        step=weights.step,
    )


def _beside(folders: Sequence[CommittedFiles]) -> dict[str, bytes]:
    """Read the files of a tokenizer and the like; of two of one name the first."""
    found: dict[str, bytes] = {}
    for folder in folders:
        for name in sorted(folder.others()):
            if name not in found and any(fnmatchcase(name, pattern) for pattern in _BESIDE):
                found[name] = folder.read(name)
    return found


def _json(folders: Iterable[CommittedFiles], name: str) -> dict[str, Any] | None:
    for folder in folders:
        if name in folder.others():
            try:
                found = json.loads(folder.read(name))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{folder.url}/{name} is no JSON: {error}") from error
            if not isinstance(found, dict):
                raise ConfigError(f"{folder.url}/{name} is no JSON object")
            return found
    return None


def _text(value: Any) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def _weights_in(like: Place | None) -> Collection[str]:
    if like is None or not any(each.name.endswith(".safetensors") for each in like[0].list(like[1])):
        return ()
    return Weights.of(like, ExportOptions()).names.keys()
