"""`THOROUGH=1` tries every case where a usual run tries a sample of many that are alike."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("THOROUGH", "0") != "0"
