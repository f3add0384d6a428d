"""What tests of hosts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate on the CPU, with nothing left of accelerators before."""
    from tests.adapters.accelerate_jobs import forget_accelerators

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    forget_accelerators()
    yield
    forget_accelerators()
