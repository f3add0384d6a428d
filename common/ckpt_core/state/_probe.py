"""What an optimizer's first step would make, found out without making it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def probe(optimizer: torch.optim.Optimizer, group: int, parameter: torch.Tensor) -> Mapping[str, Any]:
    """The state that `optimizer` makes for `parameter` in its first step, found out on a throw-away copy."""
    copy = nn.Parameter(torch.zeros_like(parameter))
    copy.grad = torch.zeros_like(parameter)
    double = object.__new__(type(optimizer))
    double.__dict__.update(optimizer.__dict__)
    double.__dict__.update(
        state=defaultdict(dict),
        param_groups=[{**optimizer.param_groups[group], "params": [copy]}],
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    # The instance's `step` may be a scheduler's wrapper around the live optimizer.
    type(optimizer).step(double)
    state: dict[str, Any] = double.state[copy]
    return state
