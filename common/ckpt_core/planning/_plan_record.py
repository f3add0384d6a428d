"""A plan as plain values, for `--json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ckpt_core.planning._cost_plan import CostPlan, SavesOfMonth, UploadCost
from ckpt_core.planning._month import RetentionCost
from ckpt_core.planning._rank_layout import RankLayout
from ckpt_core.planning._shapes import ModelShape


def plan_record(plan: CostPlan) -> dict[str, Any]:
    """Return a plan as JSON values; the page on planning has the schema."""
    terms, times, layout = plan.terms, plan.times, plan.terms.layout
    return {
        "version": 1,
        "model": _model(terms.model),
        "state": asdict(terms.state),
        "layout": _layout(layout),
        "components": [each._asdict() for each in plan.components],
        "checkpoint_bytes": plan.size_bytes,
        "bytes_per_parameter": plan.bytes_per_parameter,
        "held_bytes_per_rank": plan.held_bytes,
        "written_bytes_per_writer": plan.written_bytes,
        "storage": {
            "name": terms.storage.name,
            "write_bytes_per_second": times.write_rate,
            "write_bytes_per_second_per_writer": times.write_rate / layout.writers,
            "read_bytes_per_second": terms.storage.read_rate(layout),
            "source": terms.storage.source,
        },
        "times": {
            "mode": terms.mode,
            "stall_seconds": times.stall,
            "durable_seconds": times.durable,
            "cost_seconds": times.cost,
            "restore_seconds": times.restore,
        },
        "mtbf_seconds": plan.mtbf,
        "recommended_interval_seconds": plan.recommended,
        "recommended_interval_steps": max(round(plan.recommended / terms.numbers.step_seconds), 1),
        "recommended_overhead": plan.overhead_at(plan.recommended),
        "month": _month(plan.month),
        "retention": [_retention(each) for each in plan.retention],
        "uploads": [_upload(each) for each in plan.uploads],
        "assumptions": [each._asdict() for each in plan.assumptions],
    }


def _model(model: ModelShape) -> dict[str, Any]:
    return {
        "name": model.name,
        "source": model.source,
        "parameters": model.parameters,
        "trained_parameters": model.trained,
        "expert_parameters": model.experts,
        "tensors": model.tensors,
    }


def _layout(layout: RankLayout) -> dict[str, Any]:
    return {
        "ranks": layout.ranks,
        "nodes": layout.nodes,
        "strategy": layout.strategy,
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": layout.ep,
        "sharded_over": layout.sharded,
        "copies": layout.copies,
        "writers": layout.writers,
    }


def _month(month: SavesOfMonth) -> dict[str, Any]:
    return {
        "interval_seconds": month.interval,
        "saves": month.count,
        "overhead": month.overhead,
        "goodput": month.goodput,
        "stalled_share": month.stalled,
        "saving_share": month.saving,
        "failures": month.failures,
        "written_bytes": month.written_bytes,
        "idle_gpu_dollars": month.idle_dollars,
        "lost_gpu_dollars": month.lost_dollars,
    }


def _upload(cost: UploadCost) -> dict[str, Any]:
    kept = _retention(cost.retention)
    return {
        "to": cost.upload.name,
        "every": cost.upload.every,
        "bytes_per_second": cost.times.rate,
        "upload_seconds": cost.times.upload,
        "uploaded_seconds": cost.times.uploaded,
        "restore_seconds": cost.times.restore,
        "uploads": cost.count,
        "interval_seconds": cost.losses.interval,
        "overhead": cost.overhead,
        **kept,
    }


def _retention(cost: RetentionCost) -> dict[str, Any]:
    return {
        "keep": cost.kept.policy,
        "checkpoints_at_end": cost.kept.at_end,
        "checkpoints_at_peak": cost.kept.peak,
        "checkpoints_mean": cost.kept.mean,
        "peak_bytes": cost.peak_bytes,
        "mean_bytes": cost.mean_bytes,
        "storage_dollars": cost.storage_dollars,
        "request_dollars": cost.request_dollars,
        "egress_dollars": cost.egress_dollars,
    }
