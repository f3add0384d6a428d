"""What checkpoints of a training cost: bytes, times, interval, goodput and money."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple, final

from ckpt_core.cadence import expected_overhead, optimal_interval
from ckpt_core.errors import ConfigError
from ckpt_core.planning._terms import DTYPE_BYTES, GAINS, OPTIMIZERS, PlanTerms, option_of
from ckpt_core.policies import RetentionPolicy
from ckpt_core.retention import plan_prune, unknown_metrics
from ckpt_core.tiers import Gain, choose_codecs
from ckpt_core.types import CheckpointInfo, Parent

MONTH: Final = 30 * 86_400.0
_GB: Final = 1e9
_MOST_SAVES: Final = 300_000
_GRAIN: Final = 32
"""Large histories are pruned when they have grown by one part in so many: 3 % too much at the most."""
_DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


class StateComponent(NamedTuple):
    """One component of a checkpoint: its bytes on all ranks together, each once."""

    name: str
    size_bytes: int
    detail: str


class KeptMonth(NamedTuple):
    """What a policy keeps, and its bytes: at the end, at most, on average."""

    checkpoints_at_end: int
    checkpoints_at_peak: int
    checkpoints_mean: float
    peak_bytes: float
    mean_bytes: float


def kept_of(
    policy: RetentionPolicy,
    saves: Sequence[tuple[int, float]],
    seconds: float = MONTH,
    *,
    size_bytes: int = 1,
    weights_bytes: Callable[[str | None], int] = lambda _: 1,
) -> KeptMonth:
    """Prune after every save of a month, as a job does, and count what is kept.

    Metrics that the policy ranks by are random: each checkpoint is as likely to be the best. Of each save the
    step and the time are given; `weights_bytes` returns what its weights take in a dtype, or in their own.
    """
    metrics, chance = unknown_metrics(policy, ()), random.Random(0)
    held: list[CheckpointInfo] = []
    areas, peaks, now, before, due = [0.0, 0.0], [0, 0], [0, 0], 0.0, 1
    for step, time in saves:
        areas, before = [area + each * (time - before) for area, each in zip(areas, now, strict=True)], time
        values, name = {metric: chance.random() for metric in metrics}, str(step)
        info = CheckpointInfo(step=step, name=name, save_id=name, created=time, metrics=values)
        held.append(replace(info, size_bytes=size_bytes))
        now = [now[0] + 1, now[1] + size_bytes]
        peaks = list(map(max, peaks, now))
        if len(held) >= due:
            light = plan_prune(policy, held, time, weights_bytes=lambda _, dtype: weights_bytes(dtype))
            made = {
                info.step: replace(info, weights_of=Parent.of(info), size_bytes=weights_bytes(dtype))
                for info, dtype in light.demote
            }
            dropped = {info.step for info in light.drop}
            held = [made.get(info.step, info) for info in held if info.step not in dropped]
            now = [len(held), sum(info.size_bytes for info in held)]
            due = len(held) + 1 + len(held) // _GRAIN
    mean, mean_bytes = (
        (area + each * max(seconds - before, 0.0)) / seconds for area, each in zip(areas, now, strict=True)
    )
    return KeptMonth(len(held), peaks[0], mean, float(peaks[1]), mean_bytes)


@final
class CostPlan:
    """The plan: what checkpoints of a training cost.

    Raises:
        ConfigError: saves so often, or so seldom, cannot be planned.
    """

    def __init__(self, terms: PlanTerms) -> None:
        self.terms, self._storage = terms, terms.storage_figures()
        self.dtype = terms.weights or _DTYPES.get(terms.model.dtype, "bf16")
        self.copies = terms.data_ranks // terms.sharded
        self.writers = terms.ranks // self.copies if terms.one_replica else terms.ranks
        self.nodes = math.ceil(terms.ranks / terms.gpus_per_node)
        self.components = self._components()
        self.size_bytes = terms.size or sum(each.size_bytes for each in self.components)
        self.held_bytes = math.ceil(self.size_bytes / (terms.tp * terms.pp * terms.sharded))
        written = math.ceil(self.size_bytes / self.writers)
        shares = {"node": min(self.nodes, self.writers), "rank": self.writers, "job": 1}
        self.write_rate = self._storage["write_gbps"] * shares[self._storage["rate_of"]]
        shares |= {"node": self.nodes, "rank": terms.ranks}
        self.read_rate = self._storage["read_gbps"] * shares[self._storage["rate_of"]]
        self.codecs, self.stored_bytes, compressing = self._compressed()
        self.written_bytes = terms.replicas * math.ceil(self.stored_bytes / self.writers)
        copy = written / terms.staging_rate
        write = max(terms.replicas * self.stored_bytes / self.write_rate, compressing)
        write += self._storage["commit_seconds"]
        durable = terms.call_seconds + (copy + write if terms.mode == "blocking" else max(copy, write))
        durable = terms.durable_seconds or durable
        waits = max(0.0, copy - terms.step_seconds) if terms.mode == "overlapped" else copy
        self.stall = terms.stall_seconds or (durable if terms.mode == "sync" else terms.call_seconds + waits)
        self.durable = max(durable, self.stall)
        self.cost = self.stall + terms.slowdown * (self.durable - self.stall)
        self.restore = terms.restore_seconds or self.stored_bytes / self.read_rate

        self.mtbf = terms.mtbf or 3600.0 / (terms.failures_per_gpu_hour * terms.ranks)
        best = optimal_interval(cost=self.cost, durable=self.durable, mtbf=self.mtbf)
        self.recommended = max(best, terms.step_seconds)
        self.interval = terms.save or self.recommended
        self.seconds = terms.days * 86_400
        self.saves = int(self.seconds / self.interval)
        if self.interval < self.stall:
            raise ConfigError(
                f"a save every {self.interval:g} s cannot be: each blocks training for {self.stall:.3g} s; "
                "give a longer interval, or faster storage"
            )
        if not 0 < self.saves <= _MOST_SAVES:
            raise ConfigError(
                f"{self.saves:,} saves in {terms.days:g} days cannot be planned, only 1 to {_MOST_SAVES:,}: "
                "give another interval, such as --save 60s"
            )

    def _components(self) -> list[StateComponent]:
        terms, model = self.terms, self.terms.model
        kept, kept_bytes = model.kept
        weights = (model.parameters - kept) * DTYPE_BYTES[self.dtype] + kept_bytes
        moments, more, words = OPTIMIZERS[terms.optimizer]
        each, detail = moments * DTYPE_BYTES[terms.moments] + more, f"{terms.optimizer}: {words}"
        if terms.optimizer_bytes is not None:
            each, detail = terms.optimizer_bytes, f"{terms.optimizer_bytes:g} bytes per parameter, as given"
        elif moments:
            detail += f", {terms.moments}"
        kinds = 1 + (terms.master is not None) + (3 if moments == 2 else moments)  # with Adam's `step`
        chunks = (model.tensors or 0) * kinds * terms.sharded * terms.tp
        master, gradients = (DTYPE_BYTES.get(name or "", 0) for name in (terms.master, terms.gradients))
        has_moments = terms.optimizer != "none" or terms.optimizer_bytes is not None
        found = [
            ("weights", weights, f"{model.parameters:,} parameters, {self.dtype}"),
            ("master weights", model.trained * master, f"{terms.master}, in the optimizer"),
            ("moments", math.ceil(model.trained * each), detail) if has_moments else ("", 0, ""),
            ("gradients", model.trained * gradients, f"{terms.gradients}, of accumulation windows"),
            ("buffers", model.buffer_bytes, "persistent buffers of the modules"),
            (
                "others",
                round(terms.ranks * terms.rank_bytes + chunks * terms.chunk_bytes),
                "per-rank values, manifest and metadata",
            ),
        ]
        return [StateComponent(*each) for each in found if each[1] or each[0] in {"moments", "others"}]

    def _compressed(self) -> tuple[dict[str, str], int, float]:
        """Return codecs of components, the bytes stored, and seconds of compressing."""
        terms = self.terms
        if terms.compress is None or terms.ratio is not None:
            return {}, math.ceil(self.size_bytes / (terms.ratio or 1.0)), 0.0
        dtypes = {"weights": self.dtype, "master weights": terms.master, "moments": terms.moments}
        measured = {
            each.name: GAINS.get(f"{each.name.removeprefix('master ')} {dtypes.get(each.name)}", {})
            for each in self.components
        }
        if terms.optimizer_bytes is not None or not OPTIMIZERS[terms.optimizer][0]:
            measured["moments"] = {}  # of another form than what was measured
        scale = self.size_bytes / sum(each.size_bytes for each in self.components)
        sizes = {each.name: round(each.size_bytes * scale) for each in self.components}
        cores = terms.cores * self.writers
        codecs = dict.fromkeys(sizes, terms.compress)
        if terms.compress == "auto":
            codecs = choose_codecs(sizes, measured, write_rate=self.write_rate / terms.replicas, cores=cores)
        plain = Gain(1.0, math.inf)
        made = {name: measured[name].get(codec, plain) for name, codec in codecs.items()}
        stored = sum(sizes[name] / each.ratio for name, each in made.items())
        return codecs, math.ceil(stored), sum(sizes[name] / each.rate for name, each in made.items()) / cores

    def _compression(self) -> dict[str, Any] | None:
        """Return what compression changes, next to the same plan without it."""
        if self.terms.compress is None:
            return None
        plain = CostPlan(replace(self.terms, compress=None, ratio=None)).record()
        months = ("written_bytes", "idle_gpu_dollars", "lost_gpu_dollars")
        return {
            "codecs": [{"name": name, "codec": codec} for name, codec in self.codecs.items()],
            "ratio": self.size_bytes / self.stored_bytes,
            "stored_bytes": self.stored_bytes,
            "without": {"durable_seconds": plain["times"]["durable_seconds"]}
            | {name: plain["month"][name] for name in months}
            | {"storage_dollars": [each["storage_dollars"] for each in plain["retention"]]},
        }

    def overhead_at(self, interval: float) -> float:
        """Return the share of the time lost at an interval between saves, with failures."""
        restart = self.terms.restart_seconds + self.restore
        return expected_overhead(
            interval, cost=self.cost, durable=self.durable, mtbf=self.mtbf, restart=restart
        )

    def record(self) -> dict[str, Any]:
        """Return the plan as JSON values; the page on planning has the schema."""
        terms, model = self.terms, self.terms.model
        overhead, dollars = self.overhead_at(self.interval), terms.ranks * terms.gpu_hour / 3600
        return {
            "version": 1,
            "model": {name: getattr(model, name) for name in ("name", "source", "parameters", "tensors")}
            | {"trained_parameters": model.trained},
            "state": {name: getattr(terms, name) for name in ("optimizer", "master", "moments", "gradients")}
            | {"weights": self.dtype},
            "layout": {name: getattr(terms, name) for name in ("ranks", "tp", "pp")}
            | {"strategy": terms.layout, "sharded_over": terms.sharded, "copies": self.copies}
            | {"nodes": self.nodes, "writers": self.writers},
            "components": [each._asdict() for each in self.components],
            "checkpoint_bytes": self.size_bytes,
            "bytes_per_parameter": self.size_bytes / model.parameters,
            "held_bytes_per_rank": self.held_bytes,
            "written_bytes_per_writer": self.written_bytes,
            "storage": {
                "name": self._storage["name"],
                "write_bytes_per_second": self.write_rate,
                "write_bytes_per_second_per_writer": self.write_rate / self.writers,
                "read_bytes_per_second": self.read_rate,
                "source": self._storage["source"],
            },
            "times": {"mode": terms.mode}
            | {f"{name}_seconds": getattr(self, name) for name in ("stall", "durable", "cost", "restore")},
            "mtbf_seconds": self.mtbf,
            "recommended_interval_seconds": self.recommended,
            "recommended_interval_steps": max(round(self.recommended / terms.step_seconds), 1),
            "recommended_overhead": self.overhead_at(self.recommended),
            "compression": self._compression(),
            "month": {
                "days": terms.days,
                "interval_seconds": self.interval,
                "saves": self.saves,
                "overhead": overhead,
                "goodput": 1 - overhead,
                "stalled_share": self.stall / self.interval,
                "saving_share": self.cost / self.interval,
                "failures": self.seconds / self.mtbf,
                "written_bytes": float(self.saves) * self.stored_bytes * terms.replicas,
                "idle_gpu_dollars": self.saves * self.stall * dollars,
                "lost_gpu_dollars": overhead * self.seconds * dollars,
            },
            "retention": [self._retention(text, policy) for text, policy in terms.keep.items()],
            "assumptions": self._assumptions(),
        }

    def _retention(self, text: str, policy: RetentionPolicy) -> dict[str, Any]:
        storage, size = self._storage, self.stored_bytes * self.terms.replicas
        restores = self.seconds / self.mtbf
        times = [number * self.interval for number in range(1, self.saves + 1)]
        steps = [(max(round(time / self.terms.step_seconds), 1), time) for time in times]
        kept = kept_of(policy, steps, self.seconds, size_bytes=size, weights_bytes=self._weights_bytes)
        part = storage["part_bytes"]
        puts, gets = (math.ceil(each / part) if part else 0 for each in (size, self.stored_bytes))
        requests = self.saves * puts * storage["put_price"] + restores * gets * storage["get_price"]
        return {
            "keep": text,
            **kept._asdict(),
            "storage_dollars": kept.mean_bytes / _GB * storage["gb_month"] * self.seconds / MONTH,
            "request_dollars": requests / 1000,
            "egress_dollars": restores * self.stored_bytes / _GB * storage["egress"],
        }

    def _weights_bytes(self, dtype: str | None) -> int:
        """Return what a checkpoint has left once only its weights stay."""
        sizes = {each.name: each.size_bytes for each in self.components}
        cast = self.terms.model.parameters * DTYPE_BYTES[dtype] if dtype else sizes["weights"]
        return math.ceil((cast + sizes.get("buffers", 0)) * self.size_bytes / sum(sizes.values()))

    def _assumptions(self) -> list[dict[str, str]]:
        """Return every number that was assumed or given, with its source and its option."""
        terms, storage = self.terms, self._storage
        rows: list[tuple[str, str, str, str]] = []
        for each in fields(terms):
            term, value = each.metadata, getattr(terms, each.name)
            counts = term.get("kind") in {"rate", "time", "number", "size"} and each.name not in storage
            if counts and value is not None and (each.name != "failures_per_gpu_hour" or terms.mtbf is None):
                text = f"{value / _GB:g} GB/s" if term["kind"] == "rate" else f"{value:,.6g}"
                source = term["source"] if value == each.default else "given"
                rows.append((term["text"], text, source, option_of(each.name)))
        rates = (
            f"{storage['write_gbps'] / _GB:g} GB/s write, {storage['read_gbps'] / _GB:g} GB/s read, per "
            f"{storage['rate_of']}; ${storage['gb_month']:g} per GB and month, ${storage['put_price']:g} and "
            f"${storage['get_price']:g} per 1,000 requests, ${storage['egress']:g} per GB restored"
        )
        rows.append((f"storage {storage['name']}", rates, storage["source"], "--storage"))
        if terms.model.tensors is None:
            rows.append(("metadata", "none counted", "a number has no tensors", "MODEL config.json"))
        return [dict(zip(("name", "value", "source", "option"), row, strict=True)) for row in rows]
