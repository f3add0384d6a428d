"""Division of a state over ranks: what each holds, and what each writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final, get_args

from ckpt_core.errors import ConfigError
from ckpt_core.validation import integer, require

Strategy: TypeAlias = Literal["ddp", "fsdp", "hsdp"]
STRATEGIES: Final[tuple[Strategy, ...]] = get_args(Strategy)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """Ranks and how the state lies on them.

    Attributes:
        ranks: processes, one per GPU.
        gpus_per_node: ranks on one node.
        strategy: over the ranks that are left when `tp` and `pp` are taken.
        tp: tensor parallel degree.
        pp: stages of the pipeline.
        shards: ranks over which HSDP shards; by default those of a node, as far as `tp` leaves them.
        one_replica: only one of the ranks with equal bytes writes; if not, they divide them.
    """

    ranks: int = 1
    gpus_per_node: int = 8
    strategy: Strategy = "fsdp"
    tp: int = 1
    pp: int = 1
    shards: int | None = None
    one_replica: bool = False

    def __post_init__(self) -> None:
        optional = () if self.shards is None else (("shards", self.shards),)
        counts = (
            ("ranks", self.ranks),
            ("gpus_per_node", self.gpus_per_node),
            ("tp", self.tp),
            ("pp", self.pp),
        )
        require("layout", *(integer(name, value, minimum=1) for name, value in (*counts, *optional)))
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"layout must be one of {', '.join(STRATEGIES)}, not {self.strategy!r}")
        if self.ranks % (self.tp * self.pp):
            raise ConfigError(
                f"tp {self.tp} x pp {self.pp} = {self.tp * self.pp} does not divide {self.ranks} ranks: the "
                "ranks must be a multiple of it"
            )
        if self.shards is not None and self.strategy != "hsdp":
            raise ConfigError(f"shards are those of the layout hsdp, not of {self.strategy}")
        if self.replicas % self.sharded:
            raise ConfigError(
                f"{self.sharded} shards do not divide the {self.replicas} data parallel ranks: {self.ranks} "
                f"ranks with tp {self.tp} and pp {self.pp}"
            )

    @property
    def replicas(self) -> int:
        """The data parallel ranks: those with equal parts of the model, before sharding."""
        return self.ranks // (self.tp * self.pp)

    @property
    def sharded(self) -> int:
        """Over how many of them the state is sharded."""
        if self.strategy == "ddp":
            return 1
        if self.strategy == "fsdp":
            return self.replicas
        if self.shards is not None:
            return self.shards
        return math.gcd(self.replicas, max(self.gpus_per_node // self.tp, 1))

    @property
    def writers(self) -> int:
        """The ranks that write tensors."""
        return self.ranks // self.copies if self.one_replica else self.ranks

    @property
    def copies(self) -> int:
        """How many ranks hold the same bytes."""
        return self.replicas // self.sharded

    @property
    def nodes(self) -> int:
        """The nodes of the job."""
        return math.ceil(self.ranks / self.gpus_per_node)

    @property
    def writing_nodes(self) -> int:
        """The nodes on which ranks write."""
        return min(self.nodes, self.writers)

    @property
    def words(self) -> str:
        """The layout in words."""
        parts = [
            f"{self.ranks:,} ranks on {self.nodes:,} nodes" if self.nodes > 1 else f"{self.ranks:,} ranks",
            self.strategy,
        ]
        parts[-1] += f" over {self.sharded:,}" if self.strategy != "ddp" else ""
        parts += [f"tp {self.tp}"] if self.tp > 1 else []
        parts += [f"pp {self.pp}"] if self.pp > 1 else []
        return ", ".join(parts)

    def held(self, size_bytes: int) -> int:
        """Return the bytes of a state that a rank holds, of the largest."""
        return math.ceil(size_bytes / (self.tp * self.pp * self.sharded))

    def written(self, size_bytes: int) -> int:
        """Return the bytes of a state that a writing rank writes, of the largest."""
        return math.ceil(size_bytes / self.writers)
