"""Plans of what checkpoints cost."""

from ckpt_core.planning._costs import CostPlan, kept_of
from ckpt_core.planning._terms import PlanTerms, find_model, option_of

__all__ = ["CostPlan", "PlanTerms", "find_model", "kept_of", "option_of"]
