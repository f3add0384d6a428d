"""Other people's loading, where it is installed: `pip install --group bench`. None of it verifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, final

from typing_extensions import override

from benchmarks.contenders import Kind, Tensors
from benchmarks.loading.loader import Loader, LoadTask
from benchmarks.others import imported

_SAFETENSORS_FILE = "model.safetensors"


class _Other(Loader):
    kind: ClassVar[Kind] = "other"


@final
class TorchCheckpointing(_Other):
    """`torch_checkpointing`, as it comes but for direct I/O, with which it cannot save on ext4 or XFS."""

    key = "torch-checkpointing"
    name = "torch_checkpointing"
    format = "torch-checkpointing"

    def __init__(self, task: LoadTask) -> None:
        super().__init__(task)
        self._manager = _manager()

    @classmethod
    @override
    def write(cls, directory: Path, tensors: Tensors) -> None:
        manager = _manager()
        try:
            manager.save(str(directory), {"model": dict(tensors)})
        finally:
            manager.close()

    @override
    def load(self) -> None:
        self._manager.load(str(self.directory), into={"model": dict(self.task.tensors)}, strict=True)

    @override
    def close(self) -> None:
        self._manager.close()


class _Safetensors(_Other):
    format = "safetensors"

    def __init__(self, task: LoadTask) -> None:
        super().__init__(task)
        self._library = imported("safetensors.torch")

    @classmethod
    @override
    def write(cls, directory: Path, tensors: Tensors) -> None:
        directory.mkdir()
        imported("safetensors.torch").save_file(dict(tensors), directory / _SAFETENSORS_FILE)

    @property
    def path(self) -> Path:
        """The file."""
        return self.directory / _SAFETENSORS_FILE


@final
class SafetensorsFile(_Safetensors):
    """`load_file`, then every tensor copied into the live one."""

    key = "safetensors"
    name = "safetensors load_file + copy_"

    @override
    def load(self) -> None:
        loaded = self._library.load_file(self.path)
        for name, tensor in self.task.tensors.items():
            tensor.copy_(loaded[name])


@final
class SafetensorsOpen(_Safetensors):
    """`safe_open`, and one tensor after the other copied into the live one."""

    key = "safetensors-open"
    name = "safetensors safe_open + copy_"

    @override
    def load(self) -> None:
        with self._library.safe_open(self.path, framework="pt") as file:
            for name, tensor in self.task.tensors.items():
                tensor.copy_(file.get_tensor(name))


def _manager() -> Any:
    """One that saves in the foreground: only its loads are measured here."""
    library = imported("torch_checkpointing")
    config = imported("torch_checkpointing.config")
    files = imported("torch_checkpointing.storage.filesystem")
    return library.CheckpointManager.Config(
        save=config.SyncCheckpointSaverConfig(),
        storage_config=files.LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()
