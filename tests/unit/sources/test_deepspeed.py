"""Checkpoints of DeepSpeed are read bit by bit as its own tools read them, and nothing is executed."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnsafeCheckpointError,
)
from ckpt_core.loading import open_parts
from ckpt_core.sources import Layout, StoredTensor, recognise
from ckpt_core.sources._torch_save import Namespace, find_plain, read_tree
from ckpt_core.storage import LocalStorage
from tests.archives import unpack
from tests.unit.sources.make_deepspeed import CASES, STEPS, net

UNIVERSAL = [
    f"{name}-universal"
    for name in ("stage1-bf16", "stage1-bf16-fp32-accumulation", "stage2-fp32", "stage3-bf16")
]
TAG = f"global_step{STEPS}"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed 0.19.8 saved; see `make_deepspeed`."""
    place = tmp_path_factory.mktemp("deepspeed")
    unpack(Path(__file__).with_name("deepspeed.tar.xz"), place)
    return place


@pytest.fixture
def copied(samples: Path, tmp_path: Path) -> Any:
    def copy(name: str) -> Path:
        shutil.copytree(samples / name, tmp_path / name)
        return tmp_path / name

    return copy


def described(place: Path) -> Layout:
    found = recognise(LocalStorage(place.parent), place.name)
    assert found is not None
    return found


def read_tensors(place: Path) -> dict[str, torch.Tensor]:
    _, _, parts = open_parts(LocalStorage(place.parent), place.name)
    part, found = parts[""], dict[str, torch.Tensor]()
    for path, tensor in described(place).tensors.items():
        name = ".".join(map(str, path))
        found[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        for chunk in tensor.chunks if found[name].numel() else ():
            index = MetadataIndex(name, torch.Size(chunk.offsets))
            content = part.read_tensor(part.find([index])[index], tensor.dtype).reshape(chunk.sizes)
            box = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            found[name][box] = content
    return found


OURS = {"model": "model.{}", "master": "master.{}"}


@pytest.mark.parametrize("name", [*CASES, *UNIVERSAL])
def test_weights_masters_and_moments_are_those_of_deepspeeds_own_tools(samples: Path, name: str) -> None:
    found = read_tensors(samples / name)
    expected = load_file(samples / name.removesuffix("-universal") / "expected.safetensors")
    for key, tensor in expected.items():
        kind, _, parameter = key.partition(".")
        ours = found[OURS.get(kind, f"optimizer.state.{{}}.{kind}").format(parameter)]
        # The weights of stage 3 are the fp32 partitions, of which the live ones are rounded.
        assert torch.equal(ours.to(tensor.dtype), tensor), key
        assert ours.dtype == tensor.dtype or "stage3" in name, key
    layout = described(samples / name)
    assert layout.step == STEPS
    assert layout.values["client_state", "seen"] == 12
    assert layout.values["scheduler", "last_batch_iteration"] == STEPS - 1
    if "stage0" not in name:
        trained = {key.partition(".")[2] for key in expected if key.startswith("master.")}
        assert len(trained) == 5
        assert {f"optimizer.state.{each}.step" for each in trained} <= found.keys()


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, place: Path) -> None:
    with CheckpointManager(place.parent / "run") as manager:
        manager.load(TrainState(model=model, optimizer=optimizer, rng=False), source=place)


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = net()
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]]
    return model, torch.optim.AdamW([{"params": each} for each in groups])


@pytest.mark.parametrize("name", ["stage2-fp32", "stage2-fp32-round-robin", "stage2-fp32-universal"])
def test_a_run_of_deepspeed_goes_on_without_it(samples: Path, name: str) -> None:
    model, optimizer = training()
    load(model, optimizer, samples / name)
    expected = load_file(samples / name.removesuffix("-universal") / "expected.safetensors")
    names = {parameter: each for each, parameter in model.named_parameters()}
    for each, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[f"model.{each}"]), each
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for parameter, state in optimizer.state.items():
        assert state["step"].item() == STEPS
        if "round-robin" not in name:  # of which DeepSpeed's converter exchanges some
            assert torch.equal(state["exp_avg_sq"], expected[f"exp_avg_sq.{names[parameter]}"])
    assert len(optimizer.state) == 5


def test_a_model_in_half_precision_keeps_the_moments_of_its_masters(samples: Path) -> None:
    model, optimizer = training()
    model.bfloat16()
    load(model, optimizer, samples / "stage1-bf16")
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}


def assert_refused(place: Path, error: type[CheckpointError], says: str) -> None:
    model, optimizer = training()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(error, match=says):
        load(model, optimizer, place)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def optimizer_file(place: Path, rank: int) -> Path:
    [found] = (place / TAG).glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["stage1-bf16", "stage3-bf16"])
def test_a_missing_file_of_a_rank_is_told(copied: Any, name: str, rank: int) -> None:
    place = copied(name)
    optimizer_file(place, rank).unlink()
    assert_refused(place, CorruptCheckpointError, "lacks that of rank 0" if rank == 0 else "saved by 2 ranks")


def test_a_file_left_by_more_ranks_is_told(copied: Any) -> None:
    place = copied("stage2-fp32")
    shutil.copy(optimizer_file(place, 1), place / TAG / "zero_pp_rank_2_mp_rank_00_optim_states.pt")
    assert_refused(place, CorruptCheckpointError, "saved by 2 ranks, and has 3 files")


def test_files_of_different_stages_are_told(copied: Any, samples: Path) -> None:
    place = copied("stage1-bf16")
    shutil.copy(optimizer_file(samples / "stage3-bf16", 1), optimizer_file(place, 1))
    assert_refused(place, CorruptCheckpointError, "different stages")


def step_of(place: Path, rank: int) -> StoredTensor:
    def find(module: str, name: str) -> Any:
        if module.startswith("deepspeed"):
            return int if name == "ZeroStageEnum" else Namespace
        return find_plain(module, name)

    file = optimizer_file(place, rank)
    tree = read_tree(LocalStorage(place.parent), place.name, f"{TAG}/{file.name}", find=find)
    found: StoredTensor = tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"]
    return found


def test_optimizer_states_of_different_steps_are_told(copied: Any) -> None:
    place = copied("stage1-bf16")
    with optimizer_file(place, 1).open("r+b") as stream:
        stream.seek(step_of(place, 1).chunks[0].offset)
        stream.write(torch.tensor(4.0).numpy().tobytes())
    assert_refused(place, CorruptCheckpointError, r"different steps: \[3.0, 4.0\]")


def changed(place: Path, file: str, change: Any) -> None:
    tree = torch.load(place / TAG / file, weights_only=False)
    change(tree)
    torch.save(tree, place / TAG / file)


def test_model_states_of_different_steps_are_told(copied: Any) -> None:
    place = copied("stage3-bf16")
    changed(place, "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda tree: tree.update(global_steps=4))
    assert_refused(place, CorruptCheckpointError, "model states of different steps")


@pytest.mark.parametrize(
    "shape", [torch.Size([9, 5]), torch.Size([2, 5]), torch.Size([-7, -5]), (1 << 60, 5)]
)
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("stage1-bf16", "mp_rank_00_model_states.pt"),
        ("stage3-bf16", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ],
)
def test_shapes_that_do_not_fit_the_partitions_are_told(
    copied: Any, name: str, file: str, shape: Any
) -> None:
    place = copied(name)
    changed(place, file, lambda tree: tree["param_shapes"][0].update({"embedding.weight": shape}))
    assert_refused(place, CorruptCheckpointError, "not what DeepSpeed writes")


def test_a_model_divided_by_tensors_is_refused_with_the_tool_that_joins_it(copied: Any) -> None:
    place = copied("stage1-bf16")
    shutil.copy(place / TAG / "mp_rank_00_model_states.pt", place / TAG / "mp_rank_01_model_states.pt")
    assert_refused(place, IncompatibleCheckpointError, "ds_to_universal")


def test_a_pointer_to_a_step_that_is_gone_is_told(copied: Any) -> None:
    place = copied("stage1-bf16")
    (place / "latest").write_text("global_step9")
    (place / "zero_to_fp32.py").touch()
    assert_refused(place, CorruptCheckpointError, "global_step9")


def test_a_parameter_missing_from_a_universal_checkpoint_is_told(copied: Any) -> None:
    place = copied("stage2-fp32-universal")
    shutil.rmtree(place / f"{TAG}_universal" / "zero" / "norm.bias")
    assert_refused(place, CorruptCheckpointError, "lacks zero/norm.bias")


class _Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


def test_nothing_in_a_client_state_is_executed(
    copied: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = copied("stage1-bf16")
    changed(place, "mp_rank_00_model_states.pt", lambda tree: tree.update(mine=_Attack()))
    assert_refused(place, UnsafeCheckpointError, "system")
    assert not (tmp_path / "attacked").exists()


def mutate(place: Path, chance: random.Random) -> None:
    """Change some bytes of one file, cut it, or exchange it with another."""
    files = sorted(each for each in place.rglob("*") if each.is_file() and each.suffix != ".safetensors")
    file = chance.choice(files)
    content = bytearray(file.read_bytes())
    match chance.randrange(8):
        case 0:
            content = content[: chance.randrange(len(content))]
        case 1:
            content = bytearray(chance.choice(files).read_bytes())
        case _:
            for _ in range(chance.choice([1, 1, 2, 8])):
                content[chance.randrange(len(content))] = chance.randrange(256)
    file.write_bytes(content)


def fuzz(sample: Path, scratch: Path, mutations: int) -> int:
    """Read mutations of a sample; return how many were refused."""
    chance, refused = random.Random(sample.name), 0
    for _ in range(mutations):
        place = scratch / sample.name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(sample, place)
        mutate(place, chance)
        try:
            if recognise(LocalStorage(scratch), sample.name) is not None:
                read_tensors(place)
        except CheckpointError:
            refused += 1
    return refused


@pytest.mark.parametrize("name", ["stage1-bf16", "stage3-bf16", "stage2-fp32-universal"])
def test_damaged_files_raise_our_errors_and_nothing_else(samples: Path, tmp_path: Path, name: str) -> None:
    assert fuzz(samples / name, tmp_path, 20) > 3
