"""A checkpoint, written in a format of others."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, final

from ckpt_core.commit import Catalog, in_use
from ckpt_core.convert._averaging import averaged
from ckpt_core.convert._fill import size_of
from ckpt_core.convert._huggingface import hugging_face
from ckpt_core.convert._laid_out import DTYPES, Adapters, Conversion, ExportOptions, Place, ignore
from ckpt_core.convert._output import write
from ckpt_core.convert._trainers import torch_dist, universal
from ckpt_core.convert._whole_state import lightning, stock_dcp, torch_save
from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import public_url
from ckpt_core.errors import ConfigError
from ckpt_core.loading import find_source
from ckpt_core.names import MARKER
from ckpt_core.sources import NameTable
from ckpt_core.storage import Storage, open_around, open_storage
from ckpt_core.validation import integer, one_of, require

SINKS: Final[Mapping[str, Callable[[Place, ExportOptions], Conversion]]] = {
    "hf": hugging_face,
    "torch": torch_save,
    "lightning": lightning,
    "dcp": stock_dcp,
    "universal": universal,
    "torch_dist": torch_dist,
}
"""The formats by name: each lays out files, which one engine fills."""
_Path: TypeAlias = str | os.PathLike[str]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSummary:
    """What an export has written.

    Attributes:
        url: the place.
        source: the checkpoint.
        step: the training's; None if it is not known.
        files: their paths below the place.
        size_bytes: of all of them.
    """

    url: str
    source: str
    step: int | None
    files: Sequence[str]
    size_bytes: int


def export(  # noqa: PLR0913 - what the command line has
    place: _Path,
    out: _Path,
    *,
    to: str = "hf",
    step: int | None = None,
    like: _Path | None = None,
    dtype: str | None = None,
    adapters: Adapters | None = None,
    include: Sequence[str] = (),
    ema: str | None = None,
    shard_bytes: int = 5_000_000_000,
    names: Mapping[str, str] | None = None,
    average: int | None = None,
    decay: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    out_storage_options: Mapping[str, Any] | None = None,
    coordinator: Coordinator | None = None,
    progress: Callable[[int], None] = ignore,
    expect: Callable[[int], None] = ignore,
) -> ExportSummary:
    """Write a checkpoint in a format of others, in bounded memory.

    Collective over the ranks of a coordinator.

    What has checksums is verified on the way. The place holds all of it in the end, or nothing that looks so;
    an attempt that was killed is continued by the same call.

    Args:
        place: path or URL of a run, of a checkpoint, or of a folder or file that others wrote.
        out: path or URL to write: a name that is free, or an empty directory.
        to: the format: `hf` for a folder that `from_pretrained` reads; `torch` for one file of `torch.save`,
            `lightning` for a `.ckpt`, `dcp` for a directory of stock DCP, `universal` for one of DeepSpeed,
            `torch_dist` for one of Megatron-Core, each with the whole state.
        step: of the run; None for the newest that is not marked.
        like: a folder with `config.json` and tokenizer, and for adapters with their base; None for what the
            host saved in the checkpoint.
        dtype: `bf16`, `fp16` or `fp32` for all floating weights; None for their own.
        adapters: what becomes of adapters of PEFT: `keep` writes them alone, `merge` the model with them.
        include: patterns of names of tensors, as by `fnmatch`; all if empty.
        ema: dotted name of the item that holds the weights, such as averaged ones; None for the model.
        shard_bytes: size of the files of weights.
        names: of parameters and modules there -> ours, as `import_checkpoint` takes them.
        average: how many checkpoints to average, up to this one; None for none. See `averaged`.
        decay: of an exponential average, between 0 and 1; None for the mean.
        storage_options: for URLs; see `CheckpointManager`.
        out_storage_options: for `out`, if others are needed there.
        coordinator: of the ranks that each write a share of the files; None for this process alone.
        progress: called on several threads with bytes written; what it raises ends the export.
        expect: called once with how many bytes will be written.

    Raises:
        CheckpointExistsError: the place has something in it; nothing was written.
        CheckpointNotFoundError: there is no checkpoint, or it was pruned meanwhile.
        ConfigError: options that do not fit each other, or what is there.
        CorruptCheckpointError: the source is damaged.
        IncompatibleCheckpointError: the format does not hold what is there.
        NoRoomError: the target is full.
        OSError: a storage failed.
    """
    require(
        "export",
        one_of("to", to, SINKS),
        None if dtype is None else one_of("dtype", dtype, DTYPES),
        None if adapters is None else one_of("adapters", adapters, ("keep", "merge")),
        integer("shard_bytes", shard_bytes, minimum=1),
        None if average is None else integer("average", average, minimum=2),
        None if decay is None or (average and 0 < decay < 1) else "decay is between 0 and 1, with average=",
        "include must be a list of patterns, not a text" if isinstance(include, str) else None,
    )
    source = _found(place, step, storage_options)
    storage, directory = _target(out, storage_options if out_storage_options is None else out_storage_options)
    chosen = ExportOptions(
        like=None if like is None else open_around(like, _for(like, storage_options)),
        dtype=None if dtype is None else DTYPES[dtype],
        adapters=adapters,
        include=include,
        ema=ema,
        shard_bytes=shard_bytes,
        names=None if names is None else NameTable(tuple(names.items())),
    )
    sources = [source] if average is None else _before(source, average)
    with _in_use(sources if coordinator is None or coordinator.is_coordinator else ()):
        found = SINKS[to](source, chosen)
        if average is not None:
            plain = replace(chosen, dtype=None)
            found = averaged([SINKS[to](one, plain) for one in sources], found, decay)
        size = sum(size_of(piece, found.tensors) for file in found.files for piece in file.pieces)
        expect(size)
        write(found.tensors, found.files, storage, directory, coordinator=coordinator, progress=progress)
    return ExportSummary(
        url=f"{storage.url}/{directory}",
        source="/".join(filter(None, (source[0].url, *source[1:]))),
        step=found.step,
        files=[file.path for file in found.files],
        size_bytes=size,
    )


def _found(place: _Path, step: int | None, options: Mapping[str, Any] | None) -> Place:
    given = _for(place, options)
    if step is not None:
        run = open_storage(place, given)
        return run, Catalog(run).name_of(step), ""
    root, directory, file = find_source(place, given)
    return open_storage(root, given), directory, file


@contextmanager
def _in_use(places: Sequence[Place]) -> Generator[None]:
    """Protect checkpoints of ours from pruning, where this user may write beside them."""
    with ExitStack() as pins:
        for storage, directory, file in places:
            if not file and storage.exists(f"{directory}/{MARKER}"):
                with suppress(OSError):
                    pins.enter_context(in_use(storage, Catalog(storage).marker(directory).step))
        yield


def _before(source: Place, most: int) -> list[Place]:
    storage, directory, _ = source
    names = [info.name for info in Catalog(storage).committed() if info.usable]
    last = names.index(directory) + 1 if directory in names else 0
    if last < most:
        raise ConfigError(
            f"{storage.url} has {last} checkpoint(s) of the present lineage up to {directory} that can be "
            f"used, which is fewer than the {most} to average; nothing was written"
        )
    return [(storage, name, "") for name in names[last - most : last]]


def _target(place: _Path, options: Mapping[str, Any] | None) -> tuple[Storage, str]:
    """Open what a new directory or file will be in; return its name there, too."""
    given = _for(place, options)
    url = open_storage(place, given).url
    if "://" not in url:
        url = os.path.realpath(url)
    parent, _, name = url.rpartition("/")
    if not name or parent.endswith(":/"):
        raise ConfigError(f"{public_url(url)} has no place above it: name a directory below it to write")
    storage = open_storage(parent or "/", given)
    if storage.exists(MARKER):
        raise ConfigError(
            f"{storage.url} is a checkpoint, into which nothing else is written: name another place"
        )
    return storage, name


def _for(place: _Path, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the options for a place: a path takes none."""
    return options if options is not None and "://" in os.fspath(place) else {}
