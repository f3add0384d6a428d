"""The codec of each class of tensors brings a checkpoint to its place in the least time."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.tiers._compressing import NONE, Gain, choose_codecs

SIZES = {"weights": 10**9, "first moments": 2 * 10**9, "second moments": 2 * 10**9, "others": 10**6}
MEASURED = {
    "weights": {"zstd": Gain(1.30, 900e6), "planes": Gain(1.46, 400e6)},
    "first moments": {"zstd": Gain(1.08, 880e6), "planes": Gain(1.18, 620e6)},
    "second moments": {"zstd": Gain(1.12, 720e6), "planes": Gain(1.25, 620e6)},
}
"""As docs/measurements.md has them: bf16 weights, moments in fp32."""


def seconds(choice, *, write_rate, cores, reading=0.0, sizes=SIZES, measured=MEASURED):
    """The time of the pipeline, and the bytes stored."""
    made = {kind: measured.get(kind, {}).get(codec, Gain(1, float("inf"))) for kind, codec in choice.items()}
    working = (reading + sum(sizes[kind] / each.rate for kind, each in made.items())) / cores
    stored = sum(sizes[kind] / each.ratio for kind, each in made.items())
    return max(working, stored / write_rate), stored


def fixed(codec):
    return {kind: codec if codec in MEASURED.get(kind, ()) else NONE for kind in SIZES}


@pytest.mark.parametrize(
    ("gigabytes", "cores", "weights", "first", "second"),
    [
        (0.05, 2, "planes", "planes", "planes"),
        (0.2, 2, "planes", "planes", "planes"),
        (1, 2, "zstd", "planes", "planes"),
        (1, 16, "planes", "planes", "planes"),
        (3, 2, "planes", "none", "none"),
        (30, 1, "none", "none", "none"),
    ],
)
def test_a_slow_place_gets_what_shrinks_most_and_a_fast_one_what_costs_no_time(
    gigabytes, cores, weights, first, second
):
    found = choose_codecs(SIZES, MEASURED, write_rate=gigabytes * 1e9, cores=cores)

    assert found == {"weights": weights, "first moments": first, "second moments": second, "others": NONE}


@pytest.mark.parametrize("cores", [1, 2, 4, 16])
@pytest.mark.parametrize("gigabytes", [0.05, 0.2, 1, 3])
def test_no_fixed_choice_is_faster_at_any_store(gigabytes, cores):
    where = {"write_rate": gigabytes * 1e9, "cores": cores}
    found = seconds(choose_codecs(SIZES, MEASURED, **where), **where)

    assert found <= min(seconds(fixed(codec), **where) for codec in (NONE, "zstd", "planes"))


RATES = st.builds(Gain, st.floats(0.9, 4), st.floats(1e7, 1e10))


@given(
    st.dictionaries(st.sampled_from("abcd"), st.dictionaries(st.sampled_from(["x", "y"]), RATES), min_size=1),
    st.floats(1e7, 1e10),
    st.integers(1, 64),
    st.floats(0, 1),
)
def test_no_choice_at_all_is_faster(measured, write_rate, cores, reading):
    sizes = {kind: 10 ** (6 + number) for number, kind in enumerate(measured)}
    where = {"write_rate": write_rate, "cores": cores, "reading": reading}
    options = [[(kind, codec) for codec in (NONE, *codecs)] for kind, codecs in measured.items()]
    taken = partial(seconds, sizes=sizes, measured=measured, **where)
    best, _ = min(taken(dict(choice)) for choice in product(*options))

    found, _ = taken(choose_codecs(sizes, measured, **where))

    assert found == pytest.approx(best)


def test_nothing_to_compress_needs_no_codec():
    assert choose_codecs({}, {}, write_rate=1e9, cores=1) == {}
