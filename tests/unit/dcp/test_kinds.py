"""Every dtype and view, through the manager and back, by us and by stock tools; the rest refused by name."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_core import CheckpointManager
from ckpt_core.dcp._plan import check_kind
from ckpt_core.errors import ConfigError, SaveError
from tests.unit.dcp.saved_entries import stored_crc
from tests.unit.dcp.tensors import SHAPES, all_dtypes, content, filled

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::UserWarning")

NANS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
"""Float dtypes, and integers of their width to write bit patterns with."""


class Named(torch.Tensor):
    """A subclass that changes nothing about the data."""


class Wrapper(torch.Tensor):
    """As quantisation libraries make them: a tensor whose data are other tensors."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.inner = inner
        return made

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(60, dtype=torch.float32)
    pair = torch.complex(base, base + 1)
    return {
        "transposed": base.reshape(6, 10).t(),
        "permuted": base.reshape(3, 4, 5).permute(2, 0, 1),
        "channels_last": base[:48].reshape(2, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "strided": base[::3],
        "offset": base[7:19],
        "windows": base[:12].unfold(0, 4, 2),
        "conjugate": pair.conj(),
        "conjugate_transposed": pair.reshape(6, 10).mH,
        "negative": pair.conj().imag,
        "parameter": nn.Parameter(base[:9].reshape(3, 3).clone()),
        "frozen": nn.Parameter(base[:4].clone(), requires_grad=False),
        "buffer": nn.Buffer(base[:5].clone()),
        "subclass": base[:6].clone().as_subclass(Named),
        "of_a_graph": base.clone().requires_grad_() * 2,
        "shared_whole": base,
        "shared_again": base,
        "shared_tail": base[50:],
        "shared_bytes": base.view(torch.uint8)[::7],
    }


def not_a_number() -> dict[str, torch.Tensor]:
    """NaNs of both signs with payloads, and negative zero, as bit patterns."""
    made = {}
    for dtype, bits in NANS.items():
        greatest = torch.iinfo(bits).max
        made[str(dtype)] = torch.tensor([-1, -2, greatest, greatest - 4, -greatest - 1], dtype=bits).view(
            dtype
        )
    return made


def state() -> dict[str, Any]:
    return {
        "dtypes": {str(dtype): filled(dtype, (3, 2)) for dtype in all_dtypes()},
        "shapes": {
            f"{dtype} {shape}": filled(dtype, shape)
            for dtype in (torch.float32, torch.bfloat16, torch.uint16, torch.bool, torch.complex32)
            for shape in SHAPES
        },
        "views": views(),
        "nans": not_a_number(),
    }


def blank(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    return torch.zeros_like(value.detach().resolve_conj().resolve_neg().contiguous())


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        flat |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    found = leaves(actual)
    assert found.keys() == leaves(expected).keys()
    for name, value in leaves(expected).items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert content(found[name]) == content(value), name


@pytest.fixture(scope="module", params=["blocking", "overlapped"])
def saved(request: Any, tmp_path_factory: Any) -> Path:
    """The root of a run with one checkpoint of the state."""
    root: Path = tmp_path_factory.mktemp(request.param)
    with CheckpointManager(root, staging=request.param) as checkpoints:
        checkpoints.save(1, state())
    return root


def test_the_dtypes_and_patterns_are_all_there():
    assert {"torch.float8_e4m3fn", "torch.uint64", "torch.complex32"} <= {*map(str, all_dtypes())}
    if hasattr(torch, "float4_e2m1fn_x2"):
        assert torch.float4_e2m1fn_x2 in all_dtypes()
    for values in not_a_number().values():
        assert values.isnan().tolist() == [True, True, True, True, False]


def test_every_kind_is_loaded_bit_for_bit(saved):
    target = blank(state())
    with CheckpointManager(saved) as checkpoints:
        checkpoints.load(target)
    assert_same(target, state())


def test_every_kind_is_loaded_bit_for_bit_by_stock_dcp(saved):
    target = blank(state())
    dcp.load(target, checkpoint_id=saved / "step-000000001", no_dist=True)
    assert_same(target, state())


def test_every_kind_is_converted_bit_for_bit_by_stock_dcp(saved, tmp_path):
    dcp_to_torch_save(saved / "step-000000001", tmp_path / "whole.pt")
    assert_same(torch.load(tmp_path / "whole.pt", weights_only=True), state())


def test_every_kind_has_the_checksum_of_its_own_bytes_only(saved):
    folder = saved / "step-000000001"
    metadata = FileSystemReader(folder).read_metadata()
    expected = leaves(state())
    assert {index.fqn for index in metadata.storage_data} == expected.keys()
    for index, info in metadata.storage_data.items():
        whole = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        own = content(expected[index.fqn])
        assert stored_crc(whole, len(own)) == zlib.crc32(own), index.fqn
        assert own in whole, index.fqn


def freed() -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    return tensor


def of_dtype(name: str) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(8, dtype=torch.uint8).view(getattr(torch, name))


NO_BYTES = [
    name
    for name in (
        *(f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)),
        "bits8",
        "bits16",
        "qint8",
    )
    if hasattr(torch, name)
]
REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    **{name: (of_dtype(name), rf"dtype torch\.{name}.*view\(\) it as torch.uint8") for name in NO_BYTES},
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "quantised.*dequa"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo.*to_dense"),
    "mkldnn": (lambda: torch.ones(3, 3).to_mkldnn(), "torch._mkldnn.*to_dense"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta device.*materialise"),
    "freed": (freed, "without memory: its storage was freed"),
    "wrapper": (lambda: Wrapper(torch.ones(3)), r"test_kinds\.Wrapper.*plain tensors that it is made of"),
    "wrapper parameter": (lambda: nn.Parameter(Wrapper(torch.ones(3))), r"test_kinds\.Wrapper"),
    "expanded": (lambda: torch.ones(3, 1).expand(3, 4), r"expanded: strides \(1, 0\).*clone"),
    "strided to one": (lambda: torch.ones(5).as_strided((2, 2, 2), (0, 2, 1)), "expanded: strides"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "NestedTensor"),
}  # fmt: skip


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
@pytest.mark.parametrize(("make", "told"), REFUSED.values(), ids=REFUSED)
def test_what_no_checkpoint_can_hold_is_refused_by_name_and_nothing_is_written(tmp_path, make, told, staging):
    with CheckpointManager(tmp_path, staging=staging) as checkpoints:
        with pytest.raises(SaveError, match=rf"layer\.weight is .*{told}"):
            checkpoints.save(1, {"fine": torch.ones(2), "layer": {"weight": make()}})
        assert checkpoints.checkpoints() == []
        assert not list(tmp_path.rglob("*.distcp"))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor.*unbind"),
        (nn.UninitializedParameter, "not initialised.*run the model once"),
    ],
    ids=["nested", "lazy"],
)
def test_tensors_without_a_shape_are_refused_by_name(make, told):
    with pytest.raises(ConfigError, match=f"layer.weight is {told}"):
        check_kind(make(), "layer.weight")


def test_an_empty_tensor_needs_no_memory():
    check_kind(torch.empty(0), "w")
    check_kind(torch.ones(3)[:0], "w")
