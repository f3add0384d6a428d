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
        ep: expert parallel degree: each expert is on one of so many data parallel ranks; what the strategy
            shards, it shards on the others, too.
        shards: ranks over which HSDP shards; by default those of a node, as far as `tp` leaves them.
        one_replica: only one of the ranks with equal bytes writes; if not, they divide them.
    """

    ranks: int = 1
    gpus_per_node: int = 8
    strategy: Strategy = "fsdp"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    shards: int | None = None
    one_replica: bool = False

    def __post_init__(self) -> None:
        optional = () if self.shards is None else (("shards", self.shards),)
        counts = (
            ("ranks", self.ranks),
            ("gpus_per_node", self.gpus_per_node),
            ("tp", self.tp),
            ("pp", self.pp),
            ("ep", self.ep),
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
        if self.replicas % self.ep or max(self.ep, self.sharded) % min(self.ep, self.sharded):
            raise ConfigError(
                f"ep {self.ep} must divide the {self.replicas} data parallel ranks, and divide the "
                f"{self.sharded} over which the state is sharded or be a multiple of them"
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
    def experts_sharded(self) -> int:
        """Over how many data parallel ranks the experts are divided."""
        return max(self.ep, self.sharded)

    @property
    def expert_copies(self) -> int:
        """How many ranks hold the same bytes of an expert."""
        return self.replicas // self.experts_sharded

    @property
    def writers(self) -> int:
        """The ranks that write tensors."""
        return self.ranks // self.expert_copies if self.one_replica else self.ranks

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
        parts += [f"ep {self.ep}"] if self.ep > 1 else []
        return ", ".join(parts)

    def held(self, size_bytes: int, expert_bytes: int = 0) -> int:
        """Return the bytes of a state that a rank holds, of the largest; some of experts."""
        dense = math.ceil((size_bytes - expert_bytes) / (self.tp * self.pp * self.sharded))
        return dense + math.ceil(expert_bytes / (self.tp * self.pp * self.experts_sharded))

    def written(self, size_bytes: int, expert_bytes: int = 0) -> int:
        """Return the bytes of a state that a writing rank writes, of the largest."""
        if not self.one_replica:
            return math.ceil(size_bytes / self.ranks)
        dense = math.ceil((size_bytes - expert_bytes) * self.copies / self.ranks)
        return dense + math.ceil(expert_bytes * self.expert_copies / self.ranks)
