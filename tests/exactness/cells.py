"""What a training may be made of, which combinations there can be, and which of them can be exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, final

AXES: Final[Mapping[str, tuple[Any, ...]]] = {
    "host": ("plain", "lightning", "fabric", "accelerate", "trainer"),
    "strategy": ("single", "ddp", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp2+tp", "pp", "ep"),
    "data": ("map", "stream", "stateful map", "stateful stream"),
    "workers": ("0", "2", "persistent"),
    "shuffle": (True, False),
    "dropout": (True, False),
    "accumulation": (1, 4),
    "point": ("mid-epoch", "last batch", "edge", "epoch 2"),
    "ranks": ("same", "fewer", "more"),
    "precision": ("fp32", "bf16"),
}
"""Every axis of the matrix and its values; a cell has one value of each.

`stream` is an iterable data set, and `stateful` is torchdata's loader, around a stream that has a state.
`last batch` is a save inside the loop, `edge` one between two epochs.
"""

SAMPLES: Final = 32
EPOCHS: Final = 3


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Ranks, and how a training is spread over them.

    Attributes:
        strategy: as on the axis.
        world: the number of ranks.
        replicas: how many ranks see data of their own; the others see that of one of these.
    """

    strategy: str
    world: int
    replicas: int

    @property
    def batch(self) -> int:
        """Samples per rank; an epoch has 16 batches on one replica, and 8 on two or four."""
        return 1 if self.replicas > 3 else 2

    def replica(self, rank: int) -> int:
        """Which replica of the data a rank sees; ranks of one tensor parallel group are neighbours."""
        return rank // (self.world // self.replicas)


_PLACES: Final = {
    place.strategy: place
    for place in (
        Place(strategy="single", world=1, replicas=1),
        Place(strategy="ddp", world=2, replicas=2),
        Place(strategy="fsdp1", world=2, replicas=2),
        Place(strategy="fsdp2", world=2, replicas=2),
        Place(strategy="hsdp", world=4, replicas=4),
        Place(strategy="tp", world=2, replicas=1),
        Place(strategy="fsdp2+tp", world=4, replicas=2),
        Place(strategy="pp", world=2, replicas=1),
        Place(strategy="ep", world=2, replicas=2),
    )
}
_FEWER: Final = {
    "hsdp": _PLACES["fsdp2"],
    "fsdp2+tp": _PLACES["tp"],
}
_MORE: Final = {
    "single": _PLACES["ddp"],
    "tp": Place(strategy="tp", world=3, replicas=1),
    "pp": Place(strategy="pp", world=3, replicas=1),
    "hsdp": Place(strategy="hsdp", world=6, replicas=6),
    "fsdp2+tp": Place(strategy="fsdp2+tp", world=6, replicas=3),
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One training, and where it is cut and resumed: a value of every axis."""

    host: str
    strategy: str
    data: str
    workers: str
    shuffle: bool
    dropout: bool
    accumulation: int
    point: str
    ranks: str
    precision: str

    def __str__(self) -> str:
        return " ".join(
            [
                f"{self.host} {self.strategy} {self.point.replace(' ', '-')} {self.ranks}-ranks",
                f"{self.data.replace(' ', '-')} workers-{self.workers}",
                f"{'shuffle' if self.shuffle else 'in-order'} {'dropout' if self.dropout else 'plain'}",
                f"accumulate-{self.accumulation} {self.precision}",
            ]
        )

    @property
    def values(self) -> dict[str, Any]:
        """The value on every axis."""
        return asdict(self)

    @property
    def place(self) -> Place:
        """Where it is saved."""
        return _PLACES[self.strategy]

    @property
    def place_of_resume(self) -> Place:
        """Where it is resumed."""
        if self.ranks == "fewer":
            return _FEWER.get(self.strategy, _PLACES["single"])
        if self.ranks == "more":
            place = self.place
            more = Place(strategy=self.strategy, world=place.world + 1, replicas=place.replicas + 1)
            return _MORE.get(self.strategy, more)
        return self.place

    @property
    def batches(self) -> int:
        """Batches of an epoch, of every rank that saves."""
        return SAMPLES // (self.place.replicas * self.place.batch)

    @property
    def saves_after(self) -> tuple[int, int]:
        """The epoch and the number of its batches after which it is saved, at the edge of a window."""
        half = self.batches // 2
        return {
            "mid-epoch": (0, half),
            "last batch": (0, self.batches),
            "edge": (0, self.batches),
            "epoch 2": (1, half),
        }[self.point]


_NO_REPLICATE: Final = (
    "Accelerate 1.15 imports `ReplicateParallel` for it, which transformers 5.23 has no longer: "
    "`accelerator.prepare` fails without us, too"
)
_NO_STRATEGY: Final = {
    ("lightning", "pp"): "Lightning has no such strategy",
    ("lightning", "ep"): "Lightning has no such strategy",
    ("fabric", "pp"): "Fabric has no such strategy",
    ("fabric", "ep"): "Fabric has no such strategy",
    ("accelerate", "fsdp2+tp"): _NO_REPLICATE,
    ("accelerate", "pp"): "Accelerate has it for inference only",
    ("accelerate", "ep"): "Accelerate has no such strategy",
    ("trainer", "fsdp2+tp"): _NO_REPLICATE,
    ("trainer", "pp"): "the Trainer has no such strategy",
    ("trainer", "ep"): "the Trainer has no such strategy",
}


def impossible(values: Mapping[str, Any]) -> str:
    """Why there is no such training on a CPU, "" if there is one; of some values of a cell, or of all."""
    host, strategy = values.get("host"), values.get("strategy")
    data, ranks = values.get("data"), values.get("ranks")
    if reason := _NO_STRATEGY.get((str(host), str(strategy)), ""):
        return reason
    if data in {"stream", "stateful stream"} and values.get("shuffle"):
        return "an iterable data set has an order of its own, torch refuses to shuffle it"
    if host == "trainer" and data in {"stateful map", "stateful stream"}:
        return "the Trainer has no option for stateful loaders"
    if strategy == "single" and ranks == "fewer":
        return "there are no fewer ranks than one"
    return ""


def limited(cell: Cell) -> str:
    """Why a cell cannot be exact, whoever saves it; "" if it can."""
    if cell.ranks == "same":
        return ""
    replicas = max(cell.place.replicas, cell.place_of_resume.replicas)
    if cell.host in {"lightning", "fabric"} and cell.data == "stateful map" and cell.shuffle and replicas > 1:
        return (
            "the host deals each rank a part of a shuffle of the rank's own, so that ranks see the same "
            "samples even in a run that never resumes; give the loader a `StatefulDistributedSampler`"
        )
    if (
        cell.host == "accelerate"
        and cell.data == "stateful map"
        and cell.shuffle
        and cell.place.replicas > 1
        and cell.workers != "0"
        and cell.point == "mid-epoch"
    ):
        return (
            "stock Accelerate draws the first epoch's order in `prepare`, on each rank by itself, so that "
            "ranks see the same samples even in a run that never resumes; seed all ranks alike before it"
        )
    if "stream" in cell.data and cell.host not in {"accelerate", "trainer"}:
        return (
            "the iterable data set shares its samples among the ranks by itself, and nothing says which are "
            "left for other ranks"
        )
    return ""
