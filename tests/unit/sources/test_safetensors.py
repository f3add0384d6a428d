"""Weights in safetensors are found as their own tools wrote them, and what lies about itself is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_core.dcp import check_metadata
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from ckpt_core.loading import open_parts
from ckpt_core.sources import recognise
from ckpt_core.storage import open_around
from tests.kit.memory import MemoryStorage

MUTATIONS = 10_000
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]
TENSORS = {
    **{str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES},
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
}


def found(place: Path) -> dict[str, torch.Tensor]:
    """Every tensor at a place, by its name in the item `model`."""
    storage, directory, file = open_around(place)
    _, _, parts = open_parts(storage, directory, file=file)
    part = parts[""]
    read: dict[str, torch.Tensor] = {}
    for key, entry in part.metadata.state_dict_metadata.items():
        item, name = part.metadata.planner_data[key]
        assert item == "model"
        read[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        if entry.size.numel():
            index = next(each for each in part.metadata.storage_data if each.fqn == key)
            tensor = part.read_tensor(part.find([index])[index], entry.properties.dtype)
            read[name] = tensor.reshape(entry.size)
    return read


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(ours[name]) == bits(tensor), name


def shards(folder: Path, *, index: bool = True) -> dict[str, torch.Tensor]:
    """Write a folder of two shards, as `save_pretrained` does."""
    folder.mkdir(exist_ok=True)
    tensors = {"a.weight": torch.randn(3, 2), "b.weight": torch.randn(4), "c": torch.randn(2, 2)}
    files = {
        "model-00001-of-00002.safetensors": ["a.weight", "c"],
        "model-00002-of-00002.safetensors": ["b.weight"],
    }
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    if index:
        weight_map = {name: file for file, names in files.items() for name in names}
        write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return tensors


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def raw(path: Path, header: Any, data: bytes = b"", *, size: int | None = None) -> Path:
    """Write a file of safetensors with that header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, stop: int, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_a_file_has_every_dtype_and_shape_that_safetensors_has(tmp_path):
    save_file(TENSORS, tmp_path / "any-name.safetensors", metadata={"format": "pt"})
    assert_same(found(tmp_path / "any-name.safetensors"), TENSORS)
    assert_same(found(tmp_path), TENSORS)


@pytest.mark.parametrize("index", [True, False])
def test_a_folder_is_read_by_its_index_or_by_the_numbers_of_its_shards(tmp_path, index):
    tensors = shards(tmp_path / "hf", index=index)
    assert_same(found(tmp_path / "hf"), tensors)


def test_the_weights_that_transformers_would_take_are_taken_of_several(tmp_path):
    tensors = shards(tmp_path)
    save_file({"other": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert_same(found(tmp_path), tensors)
    assert_same(found(tmp_path / "consolidated.safetensors"), {"other": torch.ones(2)})
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "net.safetensors.index.json")
    for path in tmp_path.glob("model-*"):
        path.rename(tmp_path / path.name.replace("model", "net"))
    with pytest.raises(ConfigError, match="several sets of weights"):
        found(tmp_path)
    assert found(tmp_path / "consolidated.safetensors")


def test_a_snapshot_in_the_cache_of_the_hub_is_read_through_its_links(tmp_path):
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(TENSORS, blobs / "abcd")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abcd")
    assert_same(found(snapshot), TENSORS)
    assert_same(found(snapshot / "model.safetensors"), TENSORS)
    shutil.move(blobs / "abcd", tmp_path / "secret")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(CorruptCheckpointError, match="leads out"):
        found(snapshot)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]},
    ],
    ids=["lora", "dora", "saved modules"],
)
def test_an_adapter_of_peft_has_the_names_of_the_live_model(tmp_path, options):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, init_lora_weights=False, **options))
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    trained = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    assert_same(found(tmp_path), trained)


def test_adapters_of_another_kind_have_the_names_of_the_live_model(tmp_path):
    peft = pytest.importorskip("peft")
    for number, config in enumerate(
        (
            peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
            peft.LoHaConfig(target_modules=["q_proj"]),
            peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4),
        )
    ):
        model = peft.get_peft_model(llama(), config)
        model.save_pretrained(tmp_path / str(number))
        trained = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
        assert_same(found(tmp_path / str(number)), trained)


def llama() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "overlaps"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, 4, "overlaps"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "leaves a gap"),
        ({"a": entry(0, 8)}, 8, "has 8 bytes"),
        ({"a": entry(0, 4)}, 8, "ends? at byte|tensors end"),
        ({"a": entry(0, 400, (100,))}, 4, "tensors end"),
        ({"a": entry(0, -4, (-1,))}, 0, "should be an integer"),
        ({"a": entry(4, 0)}, 4, "has -4 bytes"),
        ({"a": entry(0, 0, (0, 1 << 60))}, 0, "should be an integer"),
        ({"a": entry(0, 4, (1.0,))}, 4, "should be an integer"),
        ({"a": entry(0, 4, (True,))}, 4, "should be an integer"),
        ({"a": {**entry(0, 4), "more": 1}}, 4, "not described"),
        ({"a": [0, 4]}, 4, "not described"),
        ({"a": {**entry(0, 4), "shape": 1}}, 4, "no shape"),
        ({"__metadata__": 3}, 0, "no mapping"),
        ([], 0, "no JSON object"),
        (b'{"a": 1, "a": 2}', 0, "twice"),
        (b'{"\\ud800": 1}', 0, "surrogate"),
        (b"[" * 100_000, 0, "recursion"),
        (b"{", 0, "no file of safetensors"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, data, words):
    path = raw(tmp_path / "model.safetensors", header, bytes(data))
    with pytest.raises(CorruptCheckpointError, match=words):
        found(path)


def test_a_header_of_absurd_size_is_never_read(tmp_path):
    path = raw(tmp_path / "model.safetensors", {}, size=4 << 30)
    with pytest.raises(CorruptCheckpointError, match="4294967296 bytes long, of the 10"):
        found(path)
    with path.open("r+b") as stream:
        stream.truncate(5 << 30)  # sparse: the file is large enough for it now
    with pytest.raises(CorruptCheckpointError, match="may be 100000000"):
        found(path)


def test_an_unknown_dtype_is_told_from_damage(tmp_path):
    path = raw(tmp_path / "model.safetensors", {"a": entry(0, 4, dtype="F128")}, bytes(4))
    with pytest.raises(IncompatibleCheckpointError, match=r"model\.safetensors: 'a' has the dtype 'F128'"):
        found(path)


def test_a_folder_that_lies_is_refused(tmp_path):
    shards(tmp_path / "hf")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    good, first = json.loads(index.read_text()), tmp_path / "hf" / "model-00001-of-00002.safetensors"

    def refused(words: str) -> None:
        with pytest.raises(CorruptCheckpointError, match=words):
            found(tmp_path / "hf")

    write(index, {"weight_map": {**good["weight_map"], "d": first.name}})
    refused("says that 'd' is in model-00001.*where it is not")
    write(index, {"weight_map": {**good["weight_map"], "b.weight": first.name}})
    refused("says that 'b.weight'")
    write(index, {"weight_map": {**good["weight_map"], "d": "model-00003-of-00002.safetensors"}})
    refused("model-00003-of-00002.safetensors: missing")
    for path in ("../x.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", 3):
        write(index, {"weight_map": {"d": path}})
        refused("no index|names what is no file")
    for content in ({}, {"weight_map": []}, {"weight_map": {}}, 3):
        write(index, content)
        refused("no index|cannot be read")
    index.write_bytes(b'{"weight_map": {"a.weight": "x", "a.weight": "y"}}')
    refused("twice")
    write(index, good)
    save_file({"b.weight": torch.zeros(4), **load_file(first)}, first)
    refused("'b.weight' is in it, and in model-00001")
    index.unlink()
    refused("'b.weight' is in it, and in model-00001")
    first.unlink()
    refused("one of 1 shards that are not all there")


def test_an_adapter_without_its_configuration_is_refused(tmp_path):
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    for content in ("", "[]", "{}", '{"peft_type": "LORA", "modules_to_save": "x"}'):
        (tmp_path / "adapter_config.json").write_text(content)
        with pytest.raises(CorruptCheckpointError, match=r"adapter_config\.json"):
            found(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"adapter_config\.json: missing"):
        found(tmp_path)


def test_any_mutation_is_read_or_refused(tmp_path):
    """Thousands of damaged folders: no other error, no hang, no large allocation."""
    shards(tmp_path)
    whole = {f"hf/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    storage, seed, refused = MemoryStorage(), random.Random(28), 0
    for key, content in whole.items():
        storage.replace(key, content)
    for _ in range(MUTATIONS):
        key = seed.choice(sorted(whole))
        storage.replace(key, mutated(whole[key], seed))
        try:
            layout = recognise(storage, "hf")
            assert layout is not None
            check_metadata(layout.metadata(), "hf", lambda file: storage.size(f"hf/{file}"))
        except CheckpointError:
            refused += 1
        storage.replace(key, whole[key])
    assert MUTATIONS / 2 < refused < MUTATIONS


def mutated(content: bytes, seed: random.Random) -> bytes:
    made = bytearray(content)
    for _ in range(seed.randint(1, 4)):
        place = seed.randrange(min(len(made), 300))
        match seed.randrange(4):
            case 0:
                made[place] = seed.randrange(256)
            case 1:
                del made[place : place + seed.randint(1, 20)]
            case 2:
                made[place:place] = bytes(seed.choices(b'{}[]":,0129e-\\u\0\xff', k=seed.randint(1, 5)))
            case _:
                made[place] ^= 1 << seed.randrange(8)
    return bytes(made)


def test_nothing_is_not_found(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="there is nothing"):
        open_around(tmp_path / "hf")
    (tmp_path / "hf").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="holds neither"):
        found(tmp_path / "hf")
    for top in ("s3://bucket", "/"):
        with pytest.raises(ConfigError, match="no folder above it"):
            open_around(top)
