from __future__ import annotations

import pytest
import torch

from ckpt_core.dcp import Fingerprints, sample
from ckpt_core.dcp._fingerprints import SAMPLE_ELEMENTS, Written, _of_device
from ckpt_core.formats.checksums import crc32


def prints(*values: object) -> bytes:
    return Fingerprints(values).encode()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.tensor(3, dtype=torch.int8),
        torch.ones(5, dtype=torch.bfloat16)[1:],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=["flat", "transposed", "single", "part", "channels_last"],
)
def test_the_fingerprint_of_a_tensor_is_the_crc_of_what_is_written(tensor):
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert prints(tensor)[4:] == crc32(content).to_bytes(4, "little")
    changed = tensor.clone()
    changed[(-1,) * changed.ndim] += 1
    assert prints(changed) != prints(tensor)


def test_conjugates_and_empty_tensors_have_one():
    value = torch.complex(torch.arange(3.0), torch.ones(3))
    assert prints(value.conj()) == prints(value.conj().resolve_conj()) != prints(value)
    assert prints(torch.empty(0, 4)) == prints(torch.empty(0, 7))


def test_plain_values_are_told_apart_and_objects_are_not():
    assert prints(0.1) != prints(0.2)
    assert prints(["a", "b"]) != prints(["b", "a"])
    assert prints(float("nan")) == prints(float("nan"))
    assert prints(object()) == prints(object())


def test_what_is_written_takes_the_crc_of_its_slot():
    tensor = torch.ones(3)
    found = Fingerprints([Written(1), tensor]).encode([7, crc32(tensor.numpy().tobytes())])
    assert found == prints(tensor, tensor)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_on_a_device_every_byte_and_its_place_count(size):
    """The sum is computed by whatever device the tensor is on."""
    octets = torch.arange(size, dtype=torch.int64).mul(37).to(torch.uint8)
    first = _of_device(octets)
    assert torch.equal(first, _of_device(octets.clone()))
    for place in range(0, size, max(1, size // 5)):
        changed = octets.clone()
        changed[place] ^= 1
        assert not torch.equal(first, _of_device(changed))
    if size > 16:
        assert not torch.equal(first, _of_device(octets.roll(8)))
    assert torch.equal(_of_device(torch.cat([octets[:1], octets])[1:]), first)


@pytest.mark.parametrize("shape", [(), (3,), (5000,), (70, 30), (4, 1, 5000)])
def test_samples_are_small_and_take_turns(shape):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    turns = [sample(whole, turn) for turn in range(1, 400)]
    assert all(0 < each.numel() <= SAMPLE_ELEMENTS for each in turns)
    assert all(torch.equal(sample(whole.t().t() if whole.ndim == 2 else whole, 7), turns[6]) for _ in "x")
    assert len({tuple(each.flatten().tolist()) for each in turns}) > (1 if whole.numel() > 1024 else 0)
