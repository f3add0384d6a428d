"""`.metadata` as columns: what is written is what stock DCP reads, and nothing else is read as columns."""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ckpt_core.dcp import Cuts, load_metadata
from ckpt_core.errors import CorruptCheckpointError, UnsafeCheckpointError
from ckpt_core.formats.consistency import check
from ckpt_core.formats.index import Boxes, Index, Places, TensorIn, decode, encode, index_of

PLACE = "root/step/.metadata"
FORMS = [("float32", "torch.strided", False, 0, False), ("bfloat16", "torch.strided", True, 2, True)]


def boxes(*cuts: list[int]) -> Boxes:
    """The grid of these cuts."""
    spans = [[(low, high - low) for low, high in pairwise(cut)] for cut in cuts]
    found = (
        np.array(list(product(*spans)), np.int64).reshape(-1, len(cuts), 2)
        if cuts
        else np.zeros((1, 0, 2), int)
    )
    return Boxes(*found.transpose(2, 0, 1))


def index(entries: list[TensorIn | None], names: list[str], first: int, transforms: list[Any]) -> Index:
    """An index whose chunks lie one after another in two files."""
    rows = [
        (name, box) for name, each in enumerate(entries) for box in (range(len(each.boxes)) if each else [-1])
    ]
    name, box = np.array(rows, np.int32).reshape(-1, 2).T
    count = np.arange(len(rows), dtype=np.int64)
    extensions = [transforms[n % len(transforms)] for n in range(len(rows))] if transforms else None
    files = ["__0_0.distcp", "__11_0.distcp"]
    places = Places(
        name,
        box,
        (count % 2).astype(np.int32),
        files,
        first + 10_000 * count,
        np.full(len(rows), 9999),
        extensions,
    )
    return Index(names, entries, [("state", n, name) for n, name in enumerate(names)], places)


cuts = st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(lambda each: [0, *sorted(each)])
kinds = st.builds(
    lambda form, grid: TensorIn(form, tuple(each[-1] for each in grid), boxes(*grid)),
    st.sampled_from(FORMS),
    st.lists(cuts, max_size=3),
)
texts = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1, max_size=9)


@st.composite
def indices(draw: Any) -> Index:
    pool = [*draw(st.lists(kinds, max_size=4)), None]
    names = draw(
        st.lists(st.one_of(texts, st.sampled_from(["offset", "fqn", "size"])), max_size=9, unique=True)
    )
    entries = [draw(st.sampled_from(pool)) for _ in names]
    transforms = draw(st.sampled_from([[], [None, ["stream.zstd/1"]], [["a", "b"]]]))
    return index(entries, names, draw(st.sampled_from([0, 1 << 31, 1 << 50])), transforms)


def told(of: Index) -> Any:
    """What an index says, however it is stored."""
    entries = [
        each and (each.properties, each.size, each.boxes.starts.tolist(), each.boxes.sizes.tolist())
        for each in of.entries
    ]
    rows = sorted((name, start or (), *rest[:3], tuple(rest[3] or ())) for name, start, *rest in of.rows())
    return of.names, entries, list(of.paths), rows


@given(indices())
def test_what_is_encoded_is_read_the_same_by_columns_by_objects_and_by_stock(made):
    content = b"".join(encode(made))
    stock = pickle.loads(content)
    assert stock.version == CURRENT_DCP_VERSION
    assert told(decode(content, PLACE)) == told(made)
    assert told(index_of(stock)) == told(made)
    assert told(decode(pickle.dumps(stock), PLACE)) == told(made)
    assert load_metadata(content, PLACE).storage_data == stock.storage_data
    assert load_metadata(content, PLACE).state_dict_metadata == stock.state_dict_metadata
    check(made, PLACE, lambda _: 1 << 51)


def large() -> Index:
    kind = TensorIn(FORMS[0], (100,), boxes(list(range(101))))
    return index([kind] * 700, [f"w{number}" for number in range(700)], 0, [])


def test_places_beyond_one_block_of_records_are_read_without_an_object_each():
    content = b"".join(encode(large()))
    before = sys.getallocatedblocks()
    found = decode(content, PLACE)
    assert sys.getallocatedblocks() - before < 20_000
    assert len(found.stored().name) == 70_000
    assert np.array_equal(np.sort(found.stored().offset), 10_000 * np.arange(70_000))


def test_places_are_found_by_name_and_start_and_no_others():
    storage = load_metadata(b"".join(encode(large())), PLACE).storage_data
    assert len(storage) == 70_000
    assert storage[MetadataIndex("w3", (7,))].offset == 3_070_000
    for key in (MetadataIndex("w3", (100,)), MetadataIndex("w3"), MetadataIndex("w700", (7,))):
        assert key not in storage


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_are_read_as_stock_reads_them_or_refused(seed):
    chance = random.Random(seed)
    kind = TensorIn(FORMS[0], (6, 2), boxes([0, 4, 6], [0, 2]))
    made = index([kind, None, kind, None], ["a", "b", "c", "d"], 0, [None, ["x"]] if seed % 2 else [])
    intact, refused = b"".join(encode(made)), 0
    for _ in range(150):
        content = bytearray(intact)
        for _ in range(chance.randint(1, 3)):
            least = len(content) - 400 if chance.random() < 0.7 else 0
            content[chance.randrange(least, len(content))] = chance.randrange(256)
        try:
            found = decode(bytes(content), PLACE)
            check(found, PLACE, lambda _: 1 << 53)
        except (CorruptCheckpointError, UnsafeCheckpointError):
            refused += 1
        else:
            assert told(found) == told(index_of(pickle.loads(content)))
    assert refused


def test_a_place_too_small_a_missing_one_and_one_too_many_are_named():
    kind = TensorIn(FORMS[0], (6,), boxes([0, 3, 6]))
    made = index([kind, None], ["w", "v"], 0, [])
    places = made.stored()
    columns = ("name", "box", "file", "offset", "length")

    def without(row: int) -> Index:
        return replace(
            made, places=replace(places, **{c: np.delete(getattr(places, c), row) for c in columns})
        )

    short = replace(made, places=replace(places, length=np.array([9999, 0, 9999])))
    for bad, what in (
        (without(1), r"the chunk of 'w' at \(3,\) is nowhere"),
        (without(2), "'v' is nowhere"),
        (short, r"the chunk of 'w' at \(3,\) has 3 elements, its place in '__11_0.distcp' 0 bytes"),
    ):
        with pytest.raises(CorruptCheckpointError, match=what):
            check(bad, PLACE, lambda _: 1 << 20)
    with pytest.raises(
        CorruptCheckpointError, match=r"'v' ends at byte 29999 of '__0_0\.distcp', which has 29998"
    ):
        check(made, PLACE, lambda _: 29_998)


@given(st.lists(cuts, max_size=3), st.data())
def test_live_chunks_are_cut_along_stored_ones_as_torch_cuts_them(grid, data):
    cells = boxes(*grid)
    sides = zip(cells.starts.tolist(), cells.sizes.tolist(), strict=True)
    chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in sides]
    spans = [
        sorted(data.draw(st.lists(st.integers(0, each[-1]), min_size=2, max_size=2, unique=True)))
        for each in grid
    ]
    live = ChunkStorageMetadata(
        torch.Size(low for low, _ in spans), torch.Size(high - low for low, high in spans)
    )
    stored = TensorStorageMetadata(None, torch.Size(each[-1] for each in grid), chunks)
    items = create_read_items_for_chunk_list("w", stored, [live])
    found = Cuts().of(chunks, live.offsets, live.sizes)
    assert sorted(found) == sorted(
        (
            item.storage_index.offset,
            tuple(item.storage_offsets),
            tuple(item.dest_offsets),
            tuple(item.lengths),
        )
        for item in items
    )
