"""Files of torch.save are read bit by bit as torch.load reads them, and nothing is executed."""

from __future__ import annotations

import argparse
import base64
import collections
import io
import os
import pickle
import random
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnsafeCheckpointError,
)
from ckpt_core.loading import open_parts
from ckpt_core.sources import Layout, recognise
from ckpt_core.storage import LocalStorage


def around(place: Path) -> tuple[LocalStorage, str, str]:
    folder, file = (place, "") if place.is_dir() else (place.parent, place.name)
    return LocalStorage(folder.parent), folder.name, file


def described(place: Path) -> Layout:
    found = recognise(*around(place))
    assert found is not None
    return found


def read_tensors(place: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a place, read chunk by chunk as a load reads it."""
    storage, directory, file = around(place)
    _, _, parts = open_parts(storage, directory, file=file)
    part, layout = parts[""], described(place)
    found: dict[str, torch.Tensor] = {}
    for path, tensor in layout.tensors.items():
        name = ".".join(map(str, path))
        found[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        for chunk in tensor.chunks if found[name].numel() else ():
            index = MetadataIndex(name, torch.Size(chunk.offsets))
            content = part.read_tensor(part.find([index])[index], tensor.dtype).reshape(chunk.sizes)
            box = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            found[name][box] = content
    return found


def leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """The tensors of a nested state, by dotted name."""
    if isinstance(tree, torch.Tensor):
        return {".".join(path): tree}
    pairs = (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    )
    return {name: each for key, inner in pairs for name, each in leaves(inner, (*path, str(key))).items()}


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_as_torch_reads(place: Path) -> None:
    expected = leaves(torch.load(place, weights_only=True))
    found = read_tensors(place)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert bits(found[name]) == bits(each), name


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.fixture
def place(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "ckpt.pt"


def saved(place: Path, content: Any) -> Path:
    torch.save(content, place)
    return place


def whole_state() -> dict[str, Any]:
    torch.manual_seed(0)
    shared, tied = torch.arange(60.0).reshape(6, 10), nn.Parameter(torch.rand(3, 4))
    return {
        "dtypes": {str(i): torch.rand(2, 3).mul(50).to(each) for i, each in enumerate(DTYPES)},
        "views": {
            "whole": shared,
            "rows": shared[2:4],
            "columns": shared[1:, 3:7],
            "transposed": shared.t(),
            "every_other": shared[::2, ::3],
            "one": shared[3, 4],
            "expanded": torch.rand(3).expand(4, 3),
            "one_to_many": torch.tensor(2.5).expand(2, 2),
            "none": torch.empty(0, 4),
        },
        "parameters": [nn.Parameter(torch.ones(2)), (tied, tied.detach().t()), [torch.tensor(7)]],
        "model": collections.OrderedDict(a=tied, b=tied),
    }


def test_every_tensor_is_read_as_torch_load_reads_it(place):
    assert_as_torch_reads(saved(place, whole_state()))


def test_a_model_and_its_optimizer_get_the_names_of_a_checkpoint_of_ours(place):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    layout = described(
        saved(place, {"state_dict": model.state_dict(), "optim": optimizer.state_dict(), "iter_num": 7})
    )
    assert [".".join(map(str, path)) for path in layout.tensors if path[0] == "model"] == [
        f"model.{name}" for name in model.state_dict()
    ]
    assert ("optimizer", "state", "0", "exp_avg") in layout.tensors
    assert layout.values["optimizer", "param_groups", 0, "params"] == [0, 1, 2, 3]
    assert (layout.values["iter_num",], layout.step) == (7, 7)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_bare_weights_are_the_model_without_the_names_of_wrappers(place, prefix):
    state = {f"{prefix}{name}": each for name, each in nn.Linear(2, 3).state_dict().items()}
    assert set(described(saved(place, state)).tensors) == {("model", "weight"), ("model", "bias")}


def test_a_value_called_as_an_item_of_ours_does_not_hide_the_item(place):
    layout = described(saved(place, {"state_dict": {"w": torch.ones(1)}, "model": "resnet50", "arch": "x"}))
    assert (list(layout.tensors), dict(layout.values)) == ([("model", "w")], {("arch",): "x"})


def test_plain_values_are_those_that_were_saved(place):
    plain = {
        "number": 3, "text": "x", "nothing": None, "pair": (0.9, 0.999), "listed": [1, [2]], "flags": {1, 2},
        "raw": b"\xff\0", "dtype": torch.float16, "device": torch.device("cuda:1"), "size": torch.Size([2]),
    }  # fmt: skip
    other = {
        "args": argparse.Namespace(lr=0.1, out=PurePosixPath("a/b")),
        "best": np.float64(0.25),
        "order": np.array([[1, 2], [3, 4]], dtype=">u4").T,
        "counts": collections.Counter("aab"),
        "lists": collections.defaultdict(list, {"k": [1]}),
        "empties": [{}, {}],
        "mixed": (5, {"w": torch.ones(1)}, [{}, {"x": 1}]),
    }
    values = described(saved(place, {"model": {"w": torch.ones(1)}, **plain, **other})).values
    expected = {(key,): each for key, each in plain.items()}
    assert {path: each for path, each in values.items() if path in expected} == expected
    assert (values["args", "lr"], values["args", "out"], values["best",]) == (0.1, "a/b", 0.25)
    assert values["order",] == [[1, 3], [2, 4]]
    assert (values["counts", "a"], values["lists", "k"], values["empties",]) == (2, [1], [{}, {}])
    assert (values["mixed", 0], values["mixed", 2, 0], values["mixed", 2, 1, "x"]) == (5, {}, 1)


OF_OMEGACONF = (
    "c-m!@dwbMG6vlVATmvFrsG^ht7EA?Jtct}Ow?fs0MS^I&V9X}7dje^)Z!#&YI09;Y+K&L=#Bb-B$wrfh{IPp7$@!i4ymKaxI|?n^"
    "wOXxKE`2GyFbX8v3LUr2Yxgk|$TSP6>lHGJbIZ%bporqolOoB}%v)cwu+6sJod%F*{zzbZnPOdyQ(xXH7cJ~Cz%$tC&hURQF0iZD"
    "k=T8+*XngPVD;J?*s~P`X&j3{Mro2;H?mM<B3xlf7WOVWctK*HgBNr6AS1>TQ|5FWjYuX@GV<0%mUANZn-WXivv|qf&k;?=BJ;+6"
    "=C29K@8D&HS4tVf5nc__H8JvoG#Pev_d1A1macla3~^xb31$^uv)$dC<T1q$ed*)%TI#^hg~bWdj}nnxpT1(@Am_fJ@TTqV;@nIO"
    "J;`!#DBwR9ZCy+z7UtYN{4gEd<<`sRhXc>kPRl6qJS#L7%o{{H*6#Q*j%=D9?uiMG_TB9q4r70m<Cwx*W=GAfm!+x1!j`+wl+V+c"
    "ZSn#?Ac5lzyF)Sbi&&PmPSE@Y-gZ#R<{G7}MVfQ>@`8xPnn<Qv-=Vo;U`9Zj%*#00H)$R_BlZ0$h10g%;iWi3x8_=sh9cJ<^f|Eb"
    "E}L~m;XRw4v-W>Sm-wak6+W=(5Y5ryJ{{Slqtqqt`$JmTqT^)5pLOt2F`$z)>u%Fp*4eV<)${*6)z>o?tXC5r37jKc_hW@mxGrh@"
    "rwX4n@#i%D^BVrVg9{~|mW}xf593VXB7=A6KK+TFv`e)%;wZ0%>l%mEa9!qlD+*V1Z9Obk6;`LU8#AEOEqqbRxuoTMS(EdXgB~q5"
    "6H*>8TqCnRM(C+KxNe(f`wBOzX1`Xr*=V-c(sZXrzvbW?!&sr^UYjF*B5o^uTZ#To!JRT_zJ#<j<og=r2M0eA572*tR*2`~Cz>&e"
    "?kN0RDe@G4Y1%)dVSWuZa1a>CZCYNvptq8*VvrXDQEhFS2!w_$6owUhq(Dt}sM%4Ceb>RgYHRybnm$X24Q)*!sc5OfxJipO4K-Tk"
    "Ag^efOw*siF{H7uP*|@lysz+}X(36?n$%doI(XQya8_IRn_&XV$opO4Q6=xO!jq;vrICNskbgS(%b*ILW6gPh4dY|Mzviry`Eusv"
    "S^t|36y1LTYo-4@"
)
"""The pickle of {"state_dict": {"w": torch.ones(2)}, "hyper_parameters": …}, by omegaconf 2.4.0."""


def test_configurations_of_omegaconf_are_plain_values(place):
    saved(place, {"w": torch.ones(2)})
    values = described(rewritten(place, "data.pkl", zlib.decompress(base64.b85decode(OF_OMEGACONF)))).values
    config = {path[2:]: value for path, value in values.items() if path[:2] == ("hyper_parameters", "cfg")}
    assert config == {
        ("lr",): 0.1, ("name",): "${lr}", ("layers", 0): 1, ("layers", 1, "w"): 2.5, ("none",): None,
        ("flag",): True, ("p", "q"): "x",
    }  # fmt: skip
    assert values["hparams_type",] == "omegaconf"


class Stranger:
    """Of a class that no reader knows."""


class Runs:
    """Executes code if it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("what", ["an object", "a whole model", "code"])
def test_what_only_code_could_rebuild_is_refused_by_name_and_not_executed(place, tmp_path, what):
    content = {"an object": Stranger(), "a whole model": nn.Linear(1, 1), "code": Runs(tmp_path / "ran")}[
        what
    ]
    named = {"an object": "Stranger", "a whole model": "torch.nn.modules.linear.Linear", "code": "mkdir"}[
        what
    ]
    with pytest.raises(UnsafeCheckpointError, match=rf"{named}.*none was executed.*torch\.save"):
        described(saved(place, {"model": {"w": torch.ones(1)}, "x": content}))
    assert not (tmp_path / "ran").exists()


def test_a_pickle_cannot_change_what_stands_for_its_names(place):
    attack = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x07\x00\x00\x00__new__NsN\x86b."
    rewritten(saved(place, {"w": torch.ones(1)}), "data.pkl", attack)
    with pytest.raises(CheckpointError):
        described(place)
    assert_as_torch_reads(saved(place, {"model": {"w": torch.ones(2)}}))


def rewritten(place: Path, name: str, content: bytes, method: int = zipfile.ZIP_STORED) -> Path:
    """Replace a record of a zip, with a right checksum."""
    with zipfile.ZipFile(place) as source:
        records = {each: source.read(each) for each in source.namelist()}
    with zipfile.ZipFile(place, "w") as target:
        for each, old in records.items():
            new = content if each.endswith(f"/{name}") else old
            target.writestr(each, new, compress_type=method if each.endswith(f"/{name}") else None)
    return place


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("byteorder", b"big", IncompatibleCheckpointError),
        ("data/0", b"1234", CorruptCheckpointError),
        ("data.pkl", b"\x80\x02K\x01.", IncompatibleCheckpointError),
        ("data.pkl", b"\x80\x02}q", CorruptCheckpointError),
    ],
)
def test_files_that_cannot_be_read_are_refused(place, name, content, error):
    rewritten(saved(place, {"w": torch.ones(100)}), name, content)
    with pytest.raises(error):
        described(place)


def test_compressed_records_are_refused(place):
    saved(place, {"w": torch.zeros(100)})
    rewritten(place, "data/0", bytes(400), zipfile.ZIP_DEFLATED)
    with pytest.raises(CorruptCheckpointError, match="compressed"):
        described(place)


def test_files_of_old_releases_are_refused_with_the_line_that_converts_them(place):
    torch.save({"w": torch.ones(1)}, place, _use_new_zipfile_serialization=False)
    with pytest.raises(IncompatibleCheckpointError, match=r"torch\.save\(torch\.load\('ckpt.pt'"):
        described(place)


@pytest.mark.parametrize("content", [b"", b"x" * 600])
def test_other_files_are_none_of_these(place, content):
    place.write_bytes(content)
    assert recognise(LocalStorage(place.parent.parent), "run", place.name) is None


def test_archives_of_others_are_none_of_these(place):
    np.savez(place.with_suffix(".npz"), a=np.ones(3))
    with pytest.raises(IncompatibleCheckpointError, match="use numpy"):
        recognise(LocalStorage(place.parent.parent), "run", "ckpt.npz")


def test_a_flipped_bit_of_a_tensor_is_found_by_the_checksum_of_the_zip(place):
    saved(place, {"w": torch.arange(1000.0)})
    chunk = described(place).tensors["model", "w"].chunks[0]
    content = bytearray(place.read_bytes())
    content[chunk.offset + 100] ^= 1
    place.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="w"):
        read_tensors(place)


def test_whatever_is_changed_in_a_file_is_read_right_or_refused(place):
    """Only errors of ours come out, quickly, or the tensors that were saved."""
    saved(place, whole_state())
    original, generator = place.read_bytes(), random.Random(0)
    payload = {
        at
        for each in described(place).tensors.values()
        for c in each.chunks
        for at in range(c.offset, c.offset + 40)
    }
    outside = [at for at in range(len(original)) if at not in payload]
    refused = 0
    for _ in range(400):
        content = bytearray(original)
        match generator.randrange(4):
            case 0:
                del content[generator.randrange(len(content)) :]
            case 1:
                at = generator.choice(outside)
                del content[at : at + generator.randrange(1, 9)]
            case _:
                for _ in range(generator.randrange(1, 4)):
                    content[generator.choice(outside)] = generator.randrange(256)
        place.write_bytes(content)
        try:
            recognise(LocalStorage(place.parent.parent), "run", place.name)
        except CheckpointError:
            refused += 1
    assert refused > 200


def test_whatever_is_changed_in_a_pickle_is_read_or_refused(place):
    saved(place, whole_state())
    with zipfile.ZipFile(place) as archive:
        original = archive.read("ckpt/data.pkl")
        others = {name: archive.read(name) for name in archive.namelist() if not name.endswith("data.pkl")}
    generator, refused = random.Random(1), 0
    for _ in range(400):
        content = bytearray(original)
        for _ in range(generator.randrange(1, 5)):
            at = generator.randrange(len(content))
            content[at : at + generator.randrange(3)] = generator.randbytes(generator.randrange(3))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("ckpt/data.pkl", bytes(content))
            for name, each in others.items():
                archive.writestr(name, each)
        place.write_bytes(buffer.getvalue())
        try:
            recognise(LocalStorage(place.parent.parent), "run", place.name)
        except CheckpointError:
            refused += 1
    assert refused > 200


def test_a_tensor_beyond_its_storage_is_refused(place):
    saved(place, {"w": torch.ones(4)})
    with zipfile.ZipFile(place) as archive:
        content = archive.read("ckpt/data.pkl")
    assert content.count(b"K\x04\x85") == 1
    rewritten(place, "data.pkl", content.replace(b"K\x04\x85", b"K\x05\x85"))
    with pytest.raises(CorruptCheckpointError, match="beyond its storage"):
        described(place)


def test_a_pickle_that_contains_itself_is_refused(place):
    saved(place, {"w": torch.ones(1)})
    itself: list[Any] = []
    itself.append(itself)
    rewritten(place, "data.pkl", pickle.dumps({"w": itself}, protocol=2))
    with pytest.raises(CorruptCheckpointError):
        described(place)
