"""How ranks that need the same bytes divide them among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.dcp import TensorRead, TensorTarget
from ckpt_core.loading._reads import BUCKET_BYTES, Bucket, dealt
from ckpt_core.reading import REQUEST_BYTES, Payload

MIB = 1 << 20

sizes = st.lists(st.integers(0, 20 * MIB), min_size=1, max_size=20)
groups = st.lists(st.integers(0, 20), min_size=2, max_size=9, unique=True).map(sorted).map(tuple)


def read(number: int, size: int, *, start: int = 0, blocks: bool = True, whole: bool = True) -> TensorRead:
    """All of a payload from `start` on, into a tensor that takes no memory before it is written to."""
    payload = Payload(
        path=f"__{number % 3}_0.distcp",
        key=f"t{number}",
        offset=number * 100 * MIB,
        size_bytes=size,
        crc32=None if blocks or not whole else 1,
        block_crcs=(0,) * -(-size // MIB) if blocks else (),
    )
    tensor = torch.empty(size - start, dtype=torch.uint8)
    target = TensorTarget(shape=(size,), dtype=torch.uint8, offsets=(start,), tensor=tensor)
    return TensorRead(name=f"t{number}", payload=payload, target=target)


def ends(buckets: Sequence[Bucket], name: str) -> list[tuple[int, int]]:
    return sorted((p.start, p.stop) for b in buckets for p in b.cells if p.read.name == name)


@given(sizes, groups, st.booleans(), st.integers(0, 5 * MIB))
def test_every_byte_is_in_one_piece_cut_where_checksums_are(sizes, members, blocks, start):
    reads = [read(n, size, start=min(start, size), blocks=blocks) for n, size in enumerate(sizes)]
    buckets = list(dealt(members, reads))
    for each in reads:
        first, last = each.target.byte_range
        found = ends(buckets, each.name)
        assert all(stop == begin and stop % REQUEST_BYTES == 0 for (_, stop), (begin, _) in pairwise(found))
        assert (found[0][0], found[-1][1]) == (first, last) if last > first else not found


@given(sizes, groups)
def test_buckets_are_bounded_and_their_pieces_aligned_and_apart(sizes, members):
    for bucket in dealt(members, [read(n, size) for n, size in enumerate(sizes)]):
        assert bucket.cells
        assert bucket.members == members
        assert bucket.owner in members
        assert bucket.size_bytes <= BUCKET_BYTES + 256
        memory = memoryview(bytearray(bucket.size_bytes))
        places = [torch.frombuffer(part, dtype=torch.uint8).data_ptr() for _, part in bucket.cut(memory)]
        base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        starts = [place - base for place in places]
        lengths = [cell.stop - cell.start for cell in bucket.cells]
        assert all(at % 64 == 0 for at in starts)
        assert all(at + size <= after for at, size, after in zip(starts, lengths, starts[1:], strict=False))
        assert starts[-1] + lengths[-1] + 256 <= bucket.size_bytes


@given(sizes, groups)
def test_members_read_about_the_same_number_of_bytes_each(sizes, members):
    shares = dict.fromkeys(members, 0)
    for bucket in dealt(members, [read(n, size) for n, size in enumerate(sizes)]):
        shares[bucket.owner] += sum(cell.stop - cell.start for cell in bucket.cells)
    assert all(abs(share - sum(sizes) / len(members)) <= REQUEST_BYTES for share in shares.values())


@given(sizes, groups, st.sets(st.integers(0, 19)))
def test_what_one_rank_must_verify_is_balanced_as_well_as_it_can_be(sizes, members, whole):
    reads = [read(n, size, blocks=n not in whole) for n, size in enumerate(sizes)]
    shares = dict.fromkeys(members, 0)
    for bucket in dealt(members, reads):
        shares[bucket.owner] += sum(cell.stop - cell.start for cell in bucket.cells)
    largest = max((size for n, size in enumerate(sizes) if n in whole), default=0)
    mean = sum(sizes) / len(members)
    assert sum(shares.values()) == sum(sizes)
    assert max(shares.values()) <= max(mean * 4 / 3, mean + largest * (1 - 1 / len(members))) + REQUEST_BYTES


def test_the_largest_tensors_go_to_different_ranks_and_the_rest_fills_up():
    reads = [read(n, size * MIB, blocks=n > 1) for n, size in enumerate((20, 8, 4, 4, 4))]
    shares = {0: 0, 1: 0}
    for bucket in dealt((0, 1), reads):
        shares[bucket.owner] += sum(cell.stop - cell.start for cell in bucket.cells)
    assert shares == {0: 20 * MIB, 1: 20 * MIB}


def test_a_large_tensor_without_a_checksum_is_read_by_all():
    owners = {bucket.owner for bucket in dealt((0, 1), [read(0, 8 * MIB, blocks=False, whole=False)])}
    assert owners == {0, 1}


@given(st.data())
def test_the_order_in_which_tensors_are_named_does_not_matter(data):
    reads = [read(n, size) for n, size in enumerate(data.draw(sizes))]
    turned = data.draw(st.permutations(reads))
    usual, other = (
        [
            (*bucket[:3], [(p.read.name, p.start, p.stop) for p in bucket.cells])
            for bucket in dealt((0, 3), each)
        ]
        for each in (reads, turned)
    )
    assert usual == other


@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2), (3, 5, 7, 9)])
def test_what_is_verified_as_a_whole_is_read_by_one_rank(members):
    reads = [read(n, 30 * MIB, blocks=False) for n in range(3)]
    buckets = list(dealt(members, reads))
    for each in reads:
        assert len({b.owner for b in buckets for p in b.cells if p.read is each}) == 1


def test_ranks_read_at_the_same_time_not_one_after_the_other():
    buckets = sorted(dealt((0, 1, 2, 3), [read(0, 4 * 3 * BUCKET_BYTES)]), key=lambda bucket: bucket[:3])
    assert [bucket.owner for bucket in buckets] == [0, 1, 2, 3] * 3
