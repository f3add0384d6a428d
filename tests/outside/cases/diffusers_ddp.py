"""diffusers' `train_unconditional.py` on two ranks, of which the main one alone calls `save_state`."""

import os

os.environ["ACCELERATE_USE_CPU"] = "true"  # without it Accelerate takes two processes for two trainings
import tests.outside.cases.diffusers_unconditional  # noqa: F401
