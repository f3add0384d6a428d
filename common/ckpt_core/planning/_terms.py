"""The terms of a plan: its model; each number once, with option and source."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, final

from ckpt_core.errors import ConfigError
from ckpt_core.policies import RetentionPolicy
from ckpt_core.tiers import Gain
from ckpt_core.validation import imported, integer, one_of, positive, require

_COUNT: Final = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([kKmMbBgGtT]?)\s*")
_FACTORS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model, as far as its checkpoints are concerned.

    Tied parameters count once. Without a model `tensors` is None; `kept` are the parameters of other dtypes
    than most, and their bytes.
    """

    name: str
    source: str
    parameters: int
    trained: int
    tensors: int | None = None
    kept: tuple[int, int] = (0, 0)
    buffer_bytes: int = 0
    dtype: str = ""


def find_model(text: str) -> ModelShape:
    """Find out what a model holds.

    Args:
        text: a number of parameters ("70B"); a `config.json` or the directory of one, which Transformers
            builds, or `package.module:function`, which is called: both under torch's meta device.

    Raises:
        ConfigError: it is none of these, or the model cannot be built.
    """
    if found := _COUNT.fullmatch(text):
        number = float(found[1].replace("_", "").replace(",", "")) * _FACTORS[found[2].lower()]
        if not math.isfinite(number):
            raise ConfigError("so many parameters are no model: give fewer than 1e300")
        if count := round(number):
            return ModelShape(
                name=text.strip(), source="a number of parameters", parameters=count, trained=count
            )
    path = Path(text).expanduser()
    if text and path.is_dir():
        path /= "config.json"
    if path.is_file():
        return _of_config(path)
    module, colon, function = text.partition(":")
    if colon and all(part.isidentifier() for part in f"{module}.{function}".split(".")):
        return _of_function(text)
    raise ConfigError(
        f"{text!r} is no model: neither a number of parameters such as 70B, nor a config.json or the "
        "directory of one, nor package.module:function"
    )


def _of_config(path: Path) -> ModelShape:
    instead = "give the number of parameters, such as 7B, or package.module:function that builds the model"
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"{path}: only Transformers builds a config, and it is not installed: install it, or {instead}"
        ) from error
    try:
        # Never code from the model's directory, or kernels of the Hub: `trust_remote_code` stays off.
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            model = make(config, attn_implementation="eager")
    except Exception as error:
        text = f"Transformers cannot build a causal language model of it: {type(error).__name__}: {error}"
        raise ConfigError(f"{path}: {text.splitlines()[0]}; {instead}") from error
    return _shape_of(model, str(path), "built by Transformers on the meta device", config.dtype or "bf16")


def _of_function(text: str) -> ModelShape:
    import torch

    if "" not in sys.path:
        sys.path.insert(0, "")
    make: Any = imported("plan", text)
    try:
        with torch.device("meta"):
            model = make()
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise ConfigError(f"{text} failed on the meta device: {kind}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{text}: it returned {type(model).__name__}, not a torch.nn.Module")
    return _shape_of(model, text, "built on the meta device", None)


def _shape_of(model: Any, name: str, source: str, dtype: Any) -> ModelShape:
    parameters = list(model.parameters())  # a tied one once
    sizes: Counter[Any] = Counter()
    for each in parameters:
        sizes[each.dtype] += each.numel()
    main = max(sizes, key=lambda each: sizes[each], default=None)  # which `--weights` replaces
    others = [each for each in parameters if each.dtype != main]
    own = {id(each) for each in parameters}
    saved = {id(each): each for each in model.state_dict(keep_vars=True).values() if id(each) not in own}
    return ModelShape(
        name=name,
        source=source,
        parameters=sum(sizes.values()),
        trained=sum(each.numel() for each in parameters if each.requires_grad),
        tensors=len(parameters),
        kept=(sum(each.numel() for each in others), sum(each.nbytes for each in others)),
        buffer_bytes=sum(getattr(each, "nbytes", 0) for each in saved.values()),
        dtype=str(main if dtype is None else dtype).removeprefix("torch."),
    )


DTYPE_BYTES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp64": 8}
OPTIMIZERS: Final[Mapping[str, tuple[float, float, str]]] = {
    # Moments of the dtype given, further bytes for each parameter, and both in words.
    "adamw": (2, 0, "2 moments"),
    "adam": (2, 0, "2 moments"),
    "sgd": (0, 0, "no state"),
    "sgd-momentum": (1, 0, "1 moment"),
    "lion": (1, 0, "1 moment"),
    "muon": (1, 0, "1 moment, as if all were hidden matrices"),
    "adafactor": (0, 2 * 4 / 4096, "rows and columns in fp32, as if of matrices of 4,096 x 4,096"),
    "adamw-8bit": (0, 2 * (1 + 4 / 256), "2 moments of a byte, a scale of 4 bytes per 256"),
    "none": (0, 0, ""),
}
_UNPRICED: Final[Mapping[str, Any]] = dict.fromkeys(
    ("gb_month", "put_price", "get_price", "egress", "part_bytes"), 0
) | {"rate_of": "node", "commit_seconds": 0.1}
_PRICED: Final = {"commit_seconds": 0.5, "part_bytes": 16 << 20}
STORAGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "nvme": {"write_gbps": 5e9, "read_gbps": 6.5e9, "commit_seconds": 0.02}
    | {"source": "one PCIe 4 data centre drive per node, sequential, as on data sheets (assumed)"},
    "s3": {"write_gbps": 12.5e9, "read_gbps": 12.5e9, "source": "100 Gb/s per node (Amazon S3 user guide)"}
    | {"gb_month": 0.023, "put_price": 0.005, "get_price": 0.0004, **_PRICED},
    "gcs": {"write_gbps": 12.5e9, "read_gbps": 12.5e9, "source": "100 Gb/s per node (assumed)"}
    | {"gb_month": 0.020, "put_price": 0.005, "get_price": 0.0004, **_PRICED},
    "azure": {"write_gbps": 7.5e9, "read_gbps": 15e9, "rate_of": "job"}
    | {"gb_month": 0.018, "put_price": 0.0065, "get_price": 0.0005, **_PRICED}
    | {"source": "60 Gb/s in and 120 Gb/s out of one account by default, hot tier, LRS (assumed)"},
    "nfs": {"write_gbps": 2e9, "read_gbps": 2e9, "rate_of": "job"}
    | {"source": "one server, 1 to 3 GB/s (remainingproblems.com, d55931e0)"},
    "selene": {"write_gbps": 273e9, "read_gbps": 1000e9, "rate_of": "job", "commit_seconds": 1.0}
    | {"source": "Lustre of Selene: 273 GB/s written, 1 TB/s read (arXiv 2104.04473, section 5.10)"},
}
_BUCKETS: Final = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}
GAINS: Final[Mapping[str, Mapping[str, Gain]]] = {
    # Of a component and its dtype: what each codec makes of it.
    "weights fp32": {"zstd": Gain(1.09, 840e6), "planes": Gain(1.18, 580e6)},
    "weights bf16": {"zstd": Gain(1.30, 900e6), "planes": Gain(1.44, 400e6)},
    "moments fp32": {"zstd": Gain(1.10, 800e6), "planes": Gain(1.21, 620e6)},
}
"""Of a training of a small GPT, in frames of 1 MiB; docs/measurements.md has the table."""
_LLAMA_3: Final = "419 interruptions in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783, section 3.3.4)"


def _term(default: Any, kind: str, text: str, source: str = "", **more: Any) -> Any:
    """Define a term: what it is, how it is written, and where its default comes from.

    Its kind is "word", "count", "switch", "size" or "rate" in bytes, "time" in seconds above 0, or "number".
    Of a word, `choices` are those known; `alone` is what its option means without one.
    """
    known = {"kind": kind, "text": text, "source": source, "choices": (), "alone": None}
    return field(default=default, metadata=known | more)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTerms:
    """What is to be planned; every term but the first two has an option of its name.

    Raises:
        ConfigError: a term is wrong, or does not go with the others.
    """

    model: ModelShape
    keep: Mapping[str, RetentionPolicy] = field(default_factory=dict[str, RetentionPolicy])

    optimizer: str = _term("adamw", "word", "whose state is saved", choices=OPTIMIZERS)
    weights: str | None = _term(None, "word", "dtype (of the model, else bf16)", choices=DTYPE_BYTES)
    master: str | None = _term(None, "word", "dtype of a second copy of the weights", choices=DTYPE_BYTES)
    moments: str = _term("fp32", "word", "dtype of the moments", choices=DTYPE_BYTES)
    gradients: str | None = _term(None, "word", "dtype of gradients saved, too", choices=DTYPE_BYTES)
    optimizer_bytes: float | None = _term(None, "number", "per parameter, instead of the moments")
    size: int | None = _term(None, "size", 'of a checkpoint, such as "782 GB", instead of all this')

    ranks: int = _term(8, "count", "processes, one per GPU")
    gpus_per_node: int = _term(8, "count", "ranks on one node")
    layout: str = _term("fsdp", "word", "of data parallel ranks", choices=("ddp", "fsdp", "hsdp"))
    tp: int = _term(1, "count", "tensor parallel degree")
    pp: int = _term(1, "count", "pipeline stages")
    shards: int | None = _term(None, "count", "of hsdp (the ranks of a node)")
    one_replica: bool | None = _term(
        None, "switch", "of ranks with equal bytes only one writes, as elsewhere"
    )
    replicas: int = _term(1, "count", "files that hold the same bytes: 1 or 2")

    storage: str = _term("s3", "word", f"one of {', '.join(STORAGES)}, or the URL of a bucket")
    write_gbps: float | None = _term(None, "rate", 'GB/s, or text such as "5 GiB/s"')
    read_gbps: float | None = _term(None, "rate", "the same")
    rate_of: str | None = _term(None, "word", "what these rates are of", choices=("node", "rank", "job"))
    commit_seconds: float | None = _term(None, "number", "from the last byte to the commit")
    gb_month: float | None = _term(None, "number", "dollars for a GB kept a month")
    put_price: float | None = _term(None, "number", "dollars for 1,000 writing requests")
    get_price: float | None = _term(None, "number", "dollars for 1,000 reading requests")
    part_bytes: int | None = _term(None, "size", "of one request")
    egress: float | None = _term(None, "number", "dollars for a GB read by a restore")

    compress: str | None = _term(
        None,
        "word",
        "what is stored; alone: as suits the storage",
        choices=("auto", "zstd", "planes"),
        alone="auto",
    )
    ratio: float | None = _term(None, "number", "plain bytes for a stored one, instead of those measured")
    cores: int = _term(4, "count", "of each writer, that compress")
    days: float = _term(30.0, "number", "of what is planned")

    mode: str = _term(
        "blocking",
        "word",
        "a save blocks until it has copied, for what the next step waits for, or until it is durable",
        choices=("blocking", "overlapped", "sync"),
    )
    save: float | None = _term(None, "time", "from start to start of saves, such as 30m (the optimum)")
    mtbf: float | None = _term(None, "time", "between failures of the job, such as 6h")
    stall_seconds: float | None = _term(None, "time", "measured, instead of computed")
    durable_seconds: float | None = _term(None, "time", "measured, instead of computed")
    restore_seconds: float | None = _term(None, "time", "measured, instead of computed")
    staging_rate: float = _term(20e9, "rate", "copy to the host, per GPU", "2/3 of PCIe 4 x16 (assumed)")
    call_seconds: float = _term(0.02, "number", "seconds of a stall beside the copy", "assumed")
    slowdown: float = _term(0.02, "number", "share of time lost while a save is in flight", "assumed")
    step_seconds: float = _term(10.0, "time", "of a step", "assumed")
    restart_seconds: float = _term(300.0, "number", "from a failure until the load begins", "assumed")
    failures_per_gpu_hour: float = _term(419 / (54 * 24 * 16_384), "number", "of one GPU", _LLAMA_3)
    gpu_hour: float = _term(4.40, "number", "dollars for a GPU", "a B200 on demand (NVIDIA, 2026-04-09)")
    rank_bytes: float = _term(37_000, "number", "values of one rank", "measured: AdamW, torch 2.13")
    chunk_bytes: float = _term(2_400, "number", "metadata and padding of a tensor's shard", "measured")

    def __post_init__(self) -> None:
        require(
            "plan", *(_problem(each.name, getattr(self, each.name), each.metadata) for each in fields(self))
        )
        wrong = {
            f"slowdown is a share of training time, below 1, not {self.slowdown:g}": self.slowdown >= 1,
            "days must be above 0": not self.days,
            "a ratio must be at least 1": self.ratio is not None and self.ratio < 1,
            "a ratio is of --compress, which is not given": self.ratio is not None and self.compress is None,
            "without failures there is no best interval: failures_per_gpu_hour is 0": (
                self.mtbf is None and not self.failures_per_gpu_hour
            ),
        }
        require("plan", *(problem for problem, holds in wrong.items() if holds))
        if self.ranks % (self.tp * self.pp):
            raise ConfigError(f"tp {self.tp} x pp {self.pp} does not divide {self.ranks} ranks")
        if self.shards is not None and self.layout != "hsdp":
            raise ConfigError(f"shards are those of the layout hsdp, not of {self.layout}")
        if self.data_ranks % self.sharded:
            raise ConfigError(
                f"{self.sharded} shards do not divide the {self.data_ranks} data parallel ranks"
            )
        self.storage_figures()

    @property
    def data_ranks(self) -> int:
        """The data parallel ranks: those with equal parts of the model, before sharding."""
        return self.ranks // (self.tp * self.pp)

    @property
    def sharded(self) -> int:
        """Over how many of them the state is sharded."""
        node = self.shards or math.gcd(self.data_ranks, max(self.gpus_per_node // self.tp, 1))
        return {"ddp": 1, "fsdp": self.data_ranks, "hsdp": node}[self.layout]

    def storage_figures(self) -> dict[str, Any]:
        """Return rates, prices and source of the storage: those known of it, or given.

        Raises:
            ConfigError: it is none that is known.
        """
        scheme, is_url, _ = self.storage.partition("://")
        kind = _BUCKETS.get(scheme, self.storage) if is_url else self.storage
        if kind not in STORAGES:
            raise ConfigError(
                f"--storage {self.storage!r}: is neither one of {', '.join(STORAGES)}, nor a URL of a "
                "bucket; give rates instead: --write-gbps 5 --read-gbps 5"
            )
        found: dict[str, Any] = {"name": kind, **_UNPRICED, **STORAGES[kind]}
        given = {name: value for name in found if (value := getattr(self, name, None)) is not None}
        found["source"] += f"; given: {' '.join(sorted(given))}" if given else ""
        return found | given


def _problem(name: str, value: Any, term: Mapping[str, Any]) -> str | None:
    if value is None or not term:
        return None
    if term["choices"]:
        return one_of(name, value, term["choices"])
    match term["kind"]:
        case "count":
            return integer(name, value, minimum=1, maximum=2 if name == "replicas" else None)
        case "size" | "rate" | "time":
            return positive(name, value)
        case "number" if not 0 <= value < math.inf:
            return f"{name} must be a finite number of at least 0, not {value!r}"
        case _:
            return None


def option_of(name: str) -> str:
    """Return the option of the command line for a term."""
    return f"--{name.replace('_', '-')}"
