"""Folders of a training, as transformers' Trainer or Accelerate saves them.

The names of the files are those in `transformers.trainer` and `accelerate.utils.constants`. Accelerate
pickles a sampler as a whole: its file is not read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, final

from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.formats.codec import damage, relative_paths
from ckpt_core.sources._deepspeed import find_deepspeed
from ckpt_core.sources._layout import Layout, StoredTensor
from ckpt_core.sources._safetensors import find_safetensors, find_weights, read_json
from ckpt_core.sources._torch_save import bare_names, layout_of, one_or_numbered, read_tree
from ckpt_core.storage import Storage

_TRAINER: Final = "trainer_state.json"
_BIN: Final = "pytorch_model.bin"
_BIN_INDEX: Final = f"{_BIN}.index.json"
_WEIGHTS: Final = (
    re.compile(r"pytorch_model(?:_fsdp)?(?:_(?P<number>\d+))?\.bin"),
    re.compile(r"model(?:_(?P<number>\d+))?\.safetensors"),
)
"""The later ones are preferred."""
_OPTIMIZER: Final = re.compile(r"optimizer(?:_(?P<number>\d+))?\.(?:pt|bin)")
_SCHEDULER: Final = re.compile(r"scheduler(?:_(?P<number>\d+))?\.(?:pt|bin)")
_OTHERS: Final = re.compile(r"(?P<item>scaler|dl_state_dict(?:_\d+)?|custom_checkpoint_\d+)\.(?:pt|bin|pkl)")
_OF_RANKS: Final = re.compile(r"(?:pytorch_model_fsdp|optimizer)(?:_\d+)?_rank\d+\.bin")
_GENERATORS: Final = re.compile(r"(?:random_states|rng_state)(?:_(?P<number>\d+))?\.(?:pkl|pth)")
_OF_ACCELERATE: Final = re.compile(r"random_states_\d+\.pkl")
_NAMES: Final = {
    "python": ("python", "random_state"),
    "numpy": ("numpy", "numpy_random_seed"),
    "torch": ("cpu", "torch_manual_seed"),
    "cuda": ("cuda", "torch_cuda_manual_seed"),
}
"""Generator -> its name in the files of the Trainer, and of Accelerate."""


def find_training_folder(storage: Storage, directory: str, files: Sequence[str]) -> Layout | None:
    """Describe a folder of a training, or of weights in `pytorch_model.bin` alone."""
    names = set(files)
    folder = _TrainingFolder(storage, directory, names)
    layout: Layout | None = None
    if _TRAINER in names:
        state = read_json(storage, directory, _TRAINER)
        kind, step = "a checkpoint of transformers' Trainer", state.get("global_step")
        layout = layout_of(kind, folder.items(), step=step)
        layout = replace(layout, values={**layout.values, ("trainer_state",): state})
    elif any(map(_OF_ACCELERATE.fullmatch, names)):
        layout = layout_of("a folder of Accelerate", folder.items())
    if layout is not None and (engine := find_deepspeed(storage, directory, files)) is not None:
        # What DeepSpeed saved there is in place of the items that it has.
        rest = layout.without({path[0] for path in (*engine.tensors, *engine.values)})
        layout = replace(
            rest,
            kind=f"{layout.kind}, with {engine.kind}",
            tensors={**rest.tensors, **engine.tensors},
            values={**rest.values, **engine.values},
        )
    if layout is not None:
        return layout
    if names & {_BIN, _BIN_INDEX} and find_safetensors(storage, directory, files) is None:
        return layout_of("a folder of Hugging Face weights", {"model": folder.model()})
    return None


@final
class _TrainingFolder:
    def __init__(self, storage: Storage, directory: str, names: Collection[str]) -> None:
        self._storage, self._directory, self._names = storage, directory, names
        self._url = f"{storage.url}/{directory}"

    def items(self) -> dict[str, Any]:
        """Return everything, as items of ours.

        Raises:
            IncompatibleCheckpointError: each rank has files of its own for weights or optimizer.
        """
        if of_ranks := sorted(filter(_OF_RANKS.fullmatch, self._names)):
            raise IncompatibleCheckpointError(
                f"{self._url} has weights or optimizer state by ranks ({of_ranks[0]}, …), which only "
                "the program that saved them can put together: load them there, and save with the type of "
                "state dict SHARDED_STATE_DICT in torch.distributed.checkpoint, or FULL_STATE_DICT"
            )
        items: dict[str, Any] = {"model": self.model()}
        for item, pattern in (("optimizer", _OPTIMIZER), ("scheduler", _SCHEDULER)):
            trees = [self._tree(name) for name in self._numbered(pattern)]
            if trees:
                items[item] = one_or_numbered(trees)
        for name in sorted(self._names):
            if match := _OTHERS.fullmatch(name):
                items[match["item"]] = self._tree(name)
        for rank, name in enumerate(self._numbered(_GENERATORS)):
            items[f"rng.{rank}"] = self._generators(name)
        return items

    def model(self) -> dict[str, StoredTensor]:
        """Return the weights; of several models under `0.`, `1.` and so on."""
        files = self._numbered(*_WEIGHTS)
        if len(files) > 1:
            states = [bare_names(self._weights(name)) for name in files]
            return {f"{i}.{name}": each for i, state in enumerate(states) for name, each in state.items()}
        if _BIN_INDEX in self._names and not files:
            return bare_names(self._of_shards())
        return bare_names(self._weights(files[0] if files else ""))

    def _weights(self, file: str) -> Mapping[str, StoredTensor]:
        place = self._storage, self._directory
        layout = find_weights(*place, file) if file else find_safetensors(*place, self._names)
        if layout is not None:
            return {".".join(map(str, path[1:])): each for path, each in layout.tensors.items()}
        return self._tree(file) if file else {}

    def _of_shards(self) -> dict[str, StoredTensor]:
        places = read_json(self._storage, self._directory, _BIN_INDEX).get("weight_map")
        if type(places) is not dict:
            raise damage(f"{self._url}/{_BIN_INDEX}", "it has no weight_map")
        try:
            files = {name: self._tree(name) for name in relative_paths(sorted(set(places.values())))}
            return {name: files[file][name] for name, file in places.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise damage(f"{self._url}/{_BIN_INDEX}", f"not what its files hold: {error!r:.200}") from error

    def _generators(self, name: str) -> dict[str, Any]:
        tree = self._tree(name)
        found = {
            ours: next((tree[key] for key in keys if key in tree), None) for ours, keys in _NAMES.items()
        }
        if isinstance(found["cuda"], StoredTensor):
            found["cuda"] = [found["cuda"]]
        return {ours: each for ours, each in found.items() if each is not None}

    def _numbered(self, *patterns: re.Pattern[str]) -> list[str]:
        """Return the files of a kind by their numbers, of which none may be missing."""
        found: dict[int, str] = {}
        for pattern in patterns:
            found |= {int(m["number"] or 0): m[0] for m in map(pattern.fullmatch, sorted(self._names)) if m}
        if sorted(found) != list(range(len(found))):
            missing = min(set(range(max(found))) - found.keys())
            raise damage(f"{self._url}/{found[max(found)]}", f"the file with the number {missing} is missing")
        return [found[number] for number in sorted(found)]

    def _tree(self, name: str) -> dict[Any, Any]:
        try:
            tree = read_tree(self._storage, self._directory, name)
        except FileNotFoundError:
            raise damage(f"{self._url}/{name}", "missing") from None
        if not isinstance(tree, dict):
            raise damage(f"{self._url}/{name}", "it is no dict that torch.save wrote")
        return tree
