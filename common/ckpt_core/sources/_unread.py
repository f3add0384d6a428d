"""Formats that are not read: what tells each, and which tool reads it."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.storage import Storage

_TELLING: Final = (
    (b"GGUF", "*.gguf", "weights in GGUF", "llama.cpp; give the weights that they were made of"),
    (b"\x89HDF\r\n\x1a\n", "*.h5", "HDF5, as Keras writes", "keras, or h5py"),
    (b"\x93NUMPY", "*.npy", "an array of numpy", "numpy.load"),
    (b"", "*.distcp", "data of a checkpoint of DCP", "the folder that it is in"),
    (b"", "*.npz", "arrays of numpy", "numpy.load"),
    (b"", "*.onnx", "a model in ONNX", "onnx.load"),
    (b"", "*.keras", "a model of Keras", "keras.saving.load_model"),
    (b"", "*.msgpack", "weights of Flax", "transformers, by from_pretrained(..., from_flax=True)"),
    (b"", "*.nemo", "an archive of NeMo", "NeMo; unpack it with tar, and give what it holds"),
    (b"", "*.data-?????-of-?????", "a checkpoint of TensorFlow", "tf.train.load_checkpoint"),
    (b"", "saved_model.pb", "a model of TensorFlow", "tf.saved_model.load"),
    (b"", "_CHECKPOINT_METADATA", "a checkpoint of Orbax", "orbax.checkpoint"),
    (b"", "manifest.ocdbt", "arrays of Orbax", "orbax.checkpoint"),
)
"""How the file begins, its name, what it is, and what reads it."""


def refuse_unread(storage: Storage, directory: str, file: str, files: Iterable[str]) -> None:
    """Refuse a file, or a folder with these files, that only another tool reads.

    Raises:
        IncompatibleCheckpointError: it is one; the message names the tool.
    """
    start = b""
    if file:
        with storage.open(f"{directory}/{file}") as stream:
            start = stream.read(16)
    for magic, pattern, what, tool in _TELLING:
        if (magic and start.startswith(magic)) or any(fnmatchcase(name, pattern) for name in files):
            place = "/".join(filter(None, (storage.url, directory, file)))
            raise IncompatibleCheckpointError(
                f"{place} is, or holds, {what}, which is not read here: use {tool}"
            )
