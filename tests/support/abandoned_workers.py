"""Has a garbage collection wait only for a moment for the workers of a data loader that a test has left.

In a collected cycle the queues of an iterator end before it does: its workers never hear that they are to
end, and it waits 5 seconds for each of them before it kills it. What ends in its turn tells them.
"""

from __future__ import annotations

from torch.utils.data import _utils

_utils.MP_STATUS_CHECK_INTERVAL = 0.2
