"""Storages by name or by figures: their rates, latencies and prices, with sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, final

from ckpt_core.errors import ConfigError
from ckpt_core.planning._numbers import at_least_zero
from ckpt_core.planning._rank_layout import RankLayout
from ckpt_core.validation import positive, require

RateOf: TypeAlias = Literal["node", "rank", "job"]
"""What a rate is of: each node, each rank, or all of them together."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StorageProfile:
    """What a storage does in a second, and what it costs.

    Attributes:
        name: for users.
        write: bytes per second, durable.
        read: bytes per second.
        rate_of: what these rates are of.
        commit_seconds: from the last byte written to the commit.
        gb_month: dollars for 10**9 bytes kept for a month.
        put_price: dollars for 1,000 writing requests.
        get_price: dollars for 1,000 reading requests.
        part_bytes: of one request; 0 if requests cost nothing.
        egress: dollars for 10**9 bytes read by a restore.
        source: where the figures come from.
    """

    name: str
    write: float
    read: float
    rate_of: RateOf = "node"
    commit_seconds: float = 0.1
    gb_month: float = 0.0
    put_price: float = 0.0
    get_price: float = 0.0
    part_bytes: int = 0
    egress: float = 0.0
    source: str = "given"

    def __post_init__(self) -> None:
        costs = ("commit_seconds", "gb_month", "put_price", "get_price", "egress")
        require(
            f"storage {self.name}",
            positive("write", self.write),
            positive("read", self.read),
            *(at_least_zero(name, getattr(self, name)) for name in costs),
        )

    def write_rate(self, layout: RankLayout) -> float:
        """Return the bytes per second of all ranks that write."""
        return self.write * {"node": layout.writing_nodes, "rank": layout.writers, "job": 1}[self.rate_of]

    def read_rate(self, layout: RankLayout) -> float:
        """Return the bytes per second of all ranks that read."""
        return self.read * {"node": layout.nodes, "rank": layout.ranks, "job": 1}[self.rate_of]


_AWS: Final = (
    "up to 100 Gb/s between S3 and one instance (Amazon S3 user guide, performance guidelines); list prices "
    "of us-east-1"
)
_GB: Final = 1e9
_PART: Final = 16 * 2**20
"""The part of a multipart upload, as this package sends it."""

STORAGES: Final[Mapping[str, StorageProfile]] = {
    each.name: each
    for each in (
        StorageProfile(
            name="nvme",
            write=5 * _GB,
            read=6.5 * _GB,
            commit_seconds=0.02,
            source="one PCIe 4 data centre drive per node, sequential, as on data sheets (assumed)",
        ),
        StorageProfile(
            name="s3",
            write=12.5 * _GB,
            read=12.5 * _GB,
            commit_seconds=0.5,
            gb_month=0.023,
            put_price=0.005,
            get_price=0.0004,
            part_bytes=_PART,
            source=_AWS,
        ),
        StorageProfile(
            name="gcs",
            write=12.5 * _GB,
            read=12.5 * _GB,
            commit_seconds=0.5,
            gb_month=0.020,
            put_price=0.005,
            get_price=0.0004,
            part_bytes=_PART,
            source="100 Gb/s per node (assumed); prices of cloud.google.com/storage/pricing-examples",
        ),
        StorageProfile(
            name="azure",
            write=7.5 * _GB,
            read=15 * _GB,
            rate_of="job",
            commit_seconds=0.5,
            gb_month=0.018,
            put_price=0.0065,
            get_price=0.0005,
            part_bytes=_PART,
            source="60 Gb/s in and 120 Gb/s out of one account by default, hot tier, LRS (assumed)",
        ),
        StorageProfile(
            name="nfs",
            write=2 * _GB,
            read=2 * _GB,
            rate_of="job",
            source="one server, 1 to 3 GB/s (remainingproblems.com, d55931e0)",
        ),
        StorageProfile(
            name="selene",
            write=273 * _GB,
            read=1000 * _GB,
            rate_of="job",
            commit_seconds=1.0,
            source="Lustre of Selene: 273 GB/s written, 1 TB/s read (arXiv 2104.04473, section 5.10)",
        ),
    )
}


def find_storage(text: str) -> StorageProfile:
    """Find a storage by its name or by a URL.

    Raises:
        ConfigError: it is neither.
    """
    kind = next((each for prefix, each in _PRICED.items() if text.startswith(prefix)), text)
    if kind not in STORAGES:
        raise ConfigError(
            f"--storage {text!r}: is neither one of {', '.join(STORAGES)}, nor a URL of a bucket; give rates "
            "instead: --write-gbps 5 --read-gbps 5"
        )
    return STORAGES[kind]


_PRICED: Final = {"s3://": "s3", "gs://": "gcs", "gcs://": "gcs", "az://": "azure", "abfs://": "azure"}


def with_storage(storage: StorageProfile, changes: Mapping[str, Any]) -> StorageProfile:
    """Return a storage with some figures replaced."""
    known = {name: value for name, value in changes.items() if value is not None}
    if not known:
        return storage
    replaced = " ".join(sorted(known))
    return replace(storage, **known, source=f"{storage.source}; given: {replaced}")
