"""Plans of what checkpoints cost."""

from ckpt_core.planning._cost_plan import (
    SAVE_MODES,
    CostPlan,
    PlanTerms,
    SaveMode,
    SaveTimes,
    UploadCost,
    make_plan,
    save_times,
)
from ckpt_core.planning._known_storages import STORAGES, StorageProfile, find_storage, with_storage
from ckpt_core.planning._models import find_model
from ckpt_core.planning._month import RetentionCost
from ckpt_core.planning._numbers import PlanNumbers, option_of, with_unit
from ckpt_core.planning._picture import draw_plan
from ckpt_core.planning._plan_record import plan_record
from ckpt_core.planning._planned_uploads import PlannedUpload
from ckpt_core.planning._rank_layout import STRATEGIES, RankLayout
from ckpt_core.planning._shapes import ModelShape, ParameterGroup, with_experts
from ckpt_core.planning._state_sizes import DTYPE_BYTES, OPTIMIZERS, TrainedState, dtype_word
from ckpt_core.planning._texts import (
    dollars_text,
    rate_of,
    seconds_from,
    seconds_text,
    share_text,
    size_text,
)

__all__ = [
    "DTYPE_BYTES",
    "OPTIMIZERS",
    "SAVE_MODES",
    "STORAGES",
    "STRATEGIES",
    "CostPlan",
    "ModelShape",
    "ParameterGroup",
    "PlanNumbers",
    "PlanTerms",
    "PlannedUpload",
    "RankLayout",
    "RetentionCost",
    "SaveMode",
    "SaveTimes",
    "StorageProfile",
    "TrainedState",
    "UploadCost",
    "dollars_text",
    "draw_plan",
    "dtype_word",
    "find_model",
    "find_storage",
    "make_plan",
    "option_of",
    "plan_record",
    "rate_of",
    "save_times",
    "seconds_from",
    "seconds_text",
    "share_text",
    "size_text",
    "with_experts",
    "with_storage",
    "with_unit",
]
