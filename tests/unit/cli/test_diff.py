"""`ckpt diff` says what of two checkpoints differs, and nothing else."""

from __future__ import annotations

import io
import json
import math
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import CheckpointManager, Counters, TrainState
from ckpt_core.cli import main
from ckpt_core.comparison import compare
from ckpt_core.storage import open_storage
from ckpt_core.types import CapturedState
from tests.unit.dcp.wrappers import Blocks, Pair
from tests.unit.training import Run

RAN: list[str] = []


class Armed:
    """An object whose pickle runs code."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return RAN.append, (self.mark,)


def saved(root: Path | str, step: int, state: Any, **options: Any) -> Path:
    with CheckpointManager(root, **options) as checkpoints:
        checkpoints.start_afresh()
        checkpoints.save(step, state)
    return Path(root) / f"step-{step:09d}"


def diff(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, dict[str, Any]]:
    code = main(["diff", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert all(line.startswith("ckpt: ") for line in captured.err.splitlines())
    return code, json.loads(captured.out) if captured.out else {}


@pytest.mark.filterwarnings("ignore")
def test_equal_states_are_equal_whatever_the_manifests_say(capsys, tmp_path):
    state = {"w": torch.arange(6.0), "n": 3}
    one = saved(tmp_path / "one", 1, state)
    other = saved(tmp_path / "other", 2, state, checksum="sha256")
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    code, found = diff(capsys, one, other)
    assert (code, found["equal"], found["tensors"], found["values"], found["num_read"]) == (
        0,
        True,
        [],
        [],
        0,
    )
    assert {fact["name"] for fact in found["facts"]} >= {"step", "run id", "configured"}
    # Stock DCP's zips have checksums, too.
    assert diff(capsys, one, tmp_path / "stock")[0] == diff(capsys, tmp_path / "stock", one)[0] == 0
    url = f"memory://{secrets.token_hex(8)}/run"
    saved(url, 1, state)
    assert diff(capsys, one, url)[0] == diff(capsys, url, f"{url}/step-000000001")[0] == 0
    assert diff(capsys, one, one) == diff(capsys, tmp_path / "one", one)
    assert main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out.endswith("equal: 1 tensors, 0 of them read, and all values\n")


def test_every_difference_of_tensors_is_named_with_figures(capsys, tmp_path):
    big = torch.randn(3, 700_000)  # more than a slab
    changed = big.clone()
    changed[1, 5] += 2
    common = {"same": torch.ones(4), "empty": torch.empty(0, 3), "i": torch.tensor([1, 2, 3])}
    a = {**common, "big": big, "shape": torch.ones(2), "dtype": torch.ones(2), "gone": torch.ones(1)}
    b = {**common, "big": changed, "shape": torch.ones(3), "dtype": torch.ones(2).bfloat16()}
    b |= {"new": torch.ones(1), "i": torch.tensor([1, 7, 7])}
    one, other = saved(tmp_path / "one", 1, a), saved(tmp_path / "other", 1, b)
    code, found = diff(capsys, one, other)
    by_name = {each["name"]: each for each in found["tensors"]}
    assert code == 1
    assert {name: each["difference"] for name, each in by_name.items()} == {
        "big": "content",
        "i": "content",
        "shape": "shape",
        "dtype": "dtype",
        "gone": "removed",
        "new": "added",
    }
    figures = by_name["big"]
    apart = changed.double() - big.double()
    assert figures["changed"] == 1
    assert figures["max_abs"] == float(apart.abs().max())
    assert math.isclose(figures["relative_norm"], float(apart.norm() / big.double().norm()), rel_tol=1e-9)
    assert (by_name["i"]["changed"], by_name["i"]["max_abs"]) == (2, None)
    assert by_name["dtype"]["b"] == {"shape": [2], "dtype": "bfloat16"}
    assert found["items"] == {"added": ["new"], "removed": ["gone"]}
    assert found["num_read"] == 2
    quick = diff(capsys, one, other, "--quick")[1]
    assert quick["num_read"] == 0
    assert {each["name"] for each in quick["tensors"]} == by_name.keys()
    assert diff(capsys, one, other, "--only", "sam*", "--only", "empty")[0] == 0
    assert main(["diff", str(one), str(other)]) == 1
    text = capsys.readouterr().out
    assert "only in b: float32 1" in text
    assert "different: 6 of 8 tensors, and 0 values; 2 tensors were read" in text


def test_tensors_made_of_others_are_compared_by_their_parts(capsys, tmp_path):
    def state(seed: int) -> dict[str, Any]:
        return {
            "first": torch.zeros(seed),
            "blocks": Blocks.filled(8, 16, 8, seed=1),
            "pair": Pair.filled(seed),
        }

    with torch.serialization.safe_globals([Blocks, Pair]):
        a, b = (saved(tmp_path / str(seed), 1, state(seed)) for seed in (1, 2))
    assert diff(capsys, a, a)[0] == 0
    code, found = diff(capsys, a, b, "--only", "blocks", "--only", "pair")
    assert (code, [each["name"] for each in found["tensors"]]) == (1, ["pair"])


@pytest.mark.filterwarnings("ignore")
def test_tensors_made_of_others_are_compared_though_their_zips_have_no_checksums(capsys, tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        for seed in (1, 2):
            dcp.save({"blocks": Blocks.filled(8, 16, 8, seed=seed)}, checkpoint_id=tmp_path / str(seed))
    finally:
        torch.serialization.set_crc32_options(True)
    assert diff(capsys, tmp_path / "1", tmp_path / "1")[0] == 0
    assert diff(capsys, tmp_path / "1", tmp_path / "2")[0] == 1


def test_values_differ_leaf_by_leaf_and_nothing_is_unpickled(capsys, tmp_path):
    def state(run: Run, tokens: int, mark: str) -> TrainState:
        run.optimizer.param_groups[0]["lr"] = tokens / 10
        return TrainState(
            model=run.model, optimizer=run.optimizer, counts=Counters(tokens=tokens), odd=Odd(mark)
        )

    one = saved(tmp_path / "run", 1, state(Run.make(), 1, "a"), allow_pickle=True)
    other = saved(tmp_path / "other", 1, state(Run.make(), 2, "b"), allow_pickle=True)
    code, found = diff(capsys, one, other)
    values = {each["name"]: (each["a"], each["b"]) for each in found["values"]}
    assert code == 1
    assert found["tensors"] == []
    assert values.pop("optimizer.param_groups.0.lr") == ("0.1", "0.2")
    assert values.pop("counts.tokens") == ("1", "2")
    ((name, texts),) = values.items()
    assert name == "pickled.shared:odd"
    assert all("bytes" in text for text in texts)
    assert RAN == []


def test_files_of_a_host_are_compared_by_their_values_or_else_by_their_bytes(capsys, tmp_path):
    def state(epoch: int, blob: bytes) -> CapturedState:
        scheduler = io.BytesIO()
        torch.save({"last_epoch": epoch, "base": [0.1]}, scheduler)
        pickled = io.BytesIO()
        torch.save(Armed(str(epoch)), pickled)
        files = {
            "scheduler.bin": scheduler.getvalue(),
            "state.json": json.dumps({"log": [{"loss": 0.5}, {"loss": epoch}]}).encode(),
            "args.bin": pickled.getvalue(),
            "notes/blob": blob,
        }
        return CapturedState(sharded={"": {"w": torch.ones(1)}}, files=files)

    one = saved(tmp_path / "one", 1, state(1, b"x" * 3_000_000))
    same = saved(tmp_path / "same", 1, state(1, b"x" * 3_000_000), checksum="sha256")
    other = saved(tmp_path / "other", 1, state(2, b"x" * 2_999_999 + b"y"), checksum="sha256")
    assert diff(capsys, one, same)[0] == 0
    code, found = diff(capsys, one, other)
    values = {each["name"]: (each["a"], each["b"]) for each in found["values"]}
    assert code == 1
    assert values.pop("notes/blob") == ("file of 3,000,000 bytes", "file of 3,000,000 bytes")
    assert all("file of" in text for text in values.pop("args.bin"))
    assert values == {"scheduler.bin.last_epoch": ("1", "2"), "state.json.log.1.loss": ("1", "2")}
    assert RAN == []


def in_safetensors(root: Path, tensors: dict[str, torch.Tensor], path: str, **options: Any) -> Path:
    from safetensors.torch import save

    files = {path: save(tensors, metadata={"format": "pt"})}
    return saved(root, 1, CapturedState(sharded={"": {"n": 3}}, files=files), **options)


@pytest.mark.parametrize("path", ["model.safetensors", "inner/adapter_model.safetensors"])
def test_weights_in_a_file_of_safetensors_alone_are_compared_as_tensors(capsys, tmp_path, path):
    weights = {
        "half": torch.randn(5, 3).bfloat16(),
        "single": torch.randn(700),
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "same": torch.arange(9),
    }
    changed = weights["single"].clone()
    changed[3] += 2
    one = in_safetensors(tmp_path / "one", weights, path)
    same = in_safetensors(tmp_path / "same", weights, path, checksum="sha256")
    other = in_safetensors(
        tmp_path / "other",
        {**weights, "single": changed, "half": weights["half"] * 0, "scalar": weights["scalar"].float()}
        | {"new": torch.ones(2)},
        path,
    )
    code, found = diff(capsys, one, same)
    assert (code, found["num_tensors"], found["num_read"]) == (0, 5, 0)
    code, found = diff(capsys, one, other)
    by_name = {each["name"]: each for each in found["tensors"]}
    assert code == 1
    assert found["values"] == []
    assert {name: each["difference"] for name, each in by_name.items()} == {
        f"{path}: single": "content",
        f"{path}: half": "content",
        f"{path}: scalar": "dtype",
        f"{path}: new": "added",
    }
    assert by_name[f"{path}: single"]["changed"] == 1
    assert by_name[f"{path}: single"]["max_abs"] == float((changed.double() - weights["single"]).abs().max())
    assert by_name[f"{path}: half"]["relative_norm"] == 1.0
    assert diff(capsys, one, other, "--only", "*: same")[0] == 0
    assert diff(capsys, one, other, "--only", f"{path}: single", "--quick")[0] == 1


@pytest.mark.parametrize("damage", ["a value", "the header", "its end", "all of it"])
def test_a_damaged_file_of_safetensors_is_trouble_and_no_difference(capsys, tmp_path, damage):
    one = in_safetensors(tmp_path / "one", {"w": torch.zeros(100)}, "model.safetensors")
    other = in_safetensors(tmp_path / "other", {"w": torch.ones(100)}, "model.safetensors")
    file = other / "model.safetensors"
    content = file.read_bytes()
    if damage == "all of it":
        file.unlink()
    else:
        at = {"a value": len(content) - 9, "the header": 12, "its end": len(content) - 1}[damage]
        cut = b"" if damage == "its end" else b"\xff" + content[at + 1 :]
        file.write_bytes(content[:at] + cut)
    assert diff(capsys, one, other)[0] == 2


def test_what_only_is_called_safetensors_is_compared_by_its_bytes(capsys, tmp_path):
    def state(content: bytes) -> CapturedState:
        return CapturedState(sharded={"": {"n": 3}}, files={"x.safetensors": content})

    huge = b'\x7f\x00\x00\x00\x00\x00\x00\x00{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'
    texts = [b"", b"text", b"\x02" + bytes(7) + b"[]", huge]
    places = [saved(tmp_path / str(n), 1, state(text)) for n, text in enumerate(texts)]
    for place in places[1:]:
        code, found = diff(capsys, places[0], place)
        assert (code, [each["name"] for each in found["values"]]) == (1, ["x.safetensors"])
        assert diff(capsys, place, place)[0] == 0


class Odd:
    """An item that needs pickle."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def state_dict(self) -> dict[str, Any]:
        return {"armed": Armed(self.mark)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def test_what_cannot_be_compared_is_trouble_and_no_difference(capsys, tmp_path):
    one = saved(tmp_path / "one", 1, {"w": torch.zeros(4000)})
    other = saved(tmp_path / "one", 2, {"w": torch.ones(4000)})
    file = other / "__0_0.distcp"
    content = file.read_bytes()
    place = content.index(torch.ones(50).numpy().tobytes())
    file.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    assert diff(capsys, one, other)[0] == 2  # its checksum, not its difference
    file.write_bytes(content[: place + 64])
    assert diff(capsys, one, other)[0] == 2
    file.unlink()
    assert diff(capsys, one, other)[0] == 2
    for wrong in (
        [one],
        [one, tmp_path / "nothing"],
        [one, one, "--steps", 1, 2],
        [tmp_path / "one", "--steps", 1, 9],
    ):
        assert diff(capsys, *wrong)[0] == 2
    assert diff(capsys, one, other, "--storage-option", "key")[0] == 2
    assert diff(capsys, one, other, "--quick")[0] == 1  # of which the checksums tell
    assert diff(capsys, tmp_path / "one", "--steps", 1, 1)[0] == 0


@pytest.mark.parametrize("names", [["mdoel.*"], ["weight", "wieght"], ["shared"]], ids=" ".join)
def test_a_pattern_that_names_nothing_is_trouble_and_not_equal(capsys, tmp_path, names):
    place = saved(tmp_path, 1, {"weight": torch.zeros(2), "counts": {"step": 3}})
    only = [argument for name in names for argument in ("--only", name)]
    assert main(["diff", str(place), str(place), *only]) == 2
    assert repr(names[-1]) in capsys.readouterr().err
    assert diff(capsys, place, place, "--only", "counts*", "--only", "weigh?")[0] == 0


def test_progress_of_a_comparison_has_a_total_and_reaches_it(tmp_path):
    base = {"same": torch.zeros(1000), "w": torch.zeros(3000), "half": torch.zeros(500, dtype=torch.bfloat16)}
    one = saved(tmp_path / "one", 1, base)
    other = saved(tmp_path / "other", 1, {**base, "w": torch.ones(3000), "half": base["half"] + 1})
    expected, seen = [], []
    compare(
        *((open_storage(str(each.parent)), each.name) for each in (one, other)),
        seen=seen.append,
        expect=expected.append,
    )
    assert expected == [2 * (3000 * 4 + 500 * 2)]
    assert sum(seen) == expected[0]
