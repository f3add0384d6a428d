"""`show`, `diff` and `verify` recognise what others wrote, and say of the rest which tool reads it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from ckpt_core import CheckpointManager

TENSORS = {"a.weight": torch.arange(6.0).reshape(3, 2), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def places(tmp_path):
    """A folder of shards, a file with another value, and a checkpoint of ours with those of the folder."""
    folder = tmp_path / "hf"
    folder.mkdir()
    files = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(TENSORS, 1)}
    for name, file in files.items():
        save_file({name: TENSORS[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    other = tmp_path / "other.safetensors"
    save_file({**TENSORS, "b": TENSORS["b"] + 2}, other)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(3, {"model": dict(TENSORS)})
    return folder, other, f"{tmp_path / 'run'}@3"


def test_diff_compares_weights_wherever_they_are(ckpt, places):
    folder, other, ours = places
    assert ckpt("diff", folder, ours)[0] == 0
    assert ckpt("diff", ours, folder / "model.safetensors.index.json")[0] == 0
    code, text, _ = ckpt("diff", folder, other, "--json")
    found = json.loads(text)
    assert code == 1
    assert [(each["name"], each["changed"], each["max_abs"]) for each in found["tensors"]] == [
        ("model.b", 4, 2.0)
    ]
    assert [found["a"], found["b"]] == [str(folder), str(other)]


def test_show_lists_what_is_in_it(ckpt, places):
    for place in places[:2]:
        code, text, _ = ckpt("show", place, "--tensors", "--json")
        found = json.loads(text)
        assert (code, found["committed"], found["size_bytes"]) == (0, False, 32)
        listed = {each["name"]: (each["shape"], each["dtype"]) for each in found["tensors"]}
        assert listed == {"model.a.weight": ([3, 2], "float32"), "model.b": ([4], "bfloat16")}
        code, text, _ = ckpt("show", place)
        assert code == 0
        assert "2, 10 elements, 32 B" in text


def test_show_of_ours_needs_no_torch(places, tmp_path):
    code = (
        "import sys; from ckpt_core.cli import main; main(['show', sys.argv[1]]); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "run" / "step-000000003"], check=True, timeout=60)


def test_verify_compares_what_can_be_compared(ckpt, places):
    folder, other, _ = places
    for place in (folder, other):
        code, text, _ = ckpt("verify", place)
        assert code == 0
        assert "it has no checksums" in text
    other.write_bytes(other.read_bytes()[:-1])
    (folder / "model-00002-of-00002.safetensors").unlink()
    for place, words in ((other, "its tensors end at byte"), (folder, "00002.safetensors: missing")):
        code, text, _ = ckpt("verify", place)
        assert code == 1
        assert words in text
    code, text, _ = ckpt("verify", folder, "--manifest-sha256", "0" * 64, "--json")
    assert code == 1
    assert [each["path"] for each in json.loads(text)["checkpoints"][0]["failures"]] == [
        "manifest.json",
        "model-00002-of-00002.safetensors",
    ]


def test_diff_refuses_a_checkpoint_that_was_never_committed(ckpt, places, tmp_path):
    torn = tmp_path / "run" / "step-000000003"
    (torn / "COMMITTED").unlink()
    code, _, told = ckpt("diff", torn, places[0])
    assert code == 2
    assert "without its COMMITTED" in told


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("x.gguf", b"GGUF\3\0\0\0", "llama.cpp"),
        ("renamed", b"GGUF\3\0\0\0", "llama.cpp"),
        ("weights", b"\x89HDF\r\n\x1a\n", "keras, or h5py"),
        ("x.onnx", b"\x08\x07", "onnx.load"),
        ("x.npz", b"PK\3\4", "numpy.load"),
        ("x.keras", b"PK\3\4", "keras.saving.load_model"),
        ("folder/flax_model.msgpack", b"\x81", "from_flax=True"),
        ("folder/model.ckpt.data-00000-of-00001", b"", "tf.train.load_checkpoint"),
        ("folder/saved_model.pb", b"", "tf.saved_model.load"),
        ("folder/_CHECKPOINT_METADATA", b"{}", "orbax.checkpoint"),
    ],
)
def test_what_is_not_read_is_named_with_the_tool_that_reads_it(ckpt, tmp_path, path, content, words):
    place = tmp_path / path
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(content)
    named = place if place.parent == tmp_path else place.parent
    for command in (["show", named], ["verify", named], ["diff", named, named]):
        code, _, told = ckpt(*command)
        assert code == (2 if command[0] == "diff" else 1)
        assert f"which is not read here: use {words}" in told or words in told


def test_a_file_of_no_format_is_no_checkpoint(ckpt, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for command in ("show", "verify"):
        code, _, told = ckpt(command, tmp_path / "notes.txt")
        assert code == 2
        assert "a file, not a checkpoint" in told
