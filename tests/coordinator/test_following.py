"""The command that follows a job on a cluster, without the cluster."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from headgate.errors import JobError
from headgate.runtime.cluster import ray_driver
from headgate.runtime.cluster.ray_actors import Lead

from .test_takeovers import make_spec

ASKED_MAX = 50


class OutOfReach:
    """A leader that lives, where this machine does not reach it."""

    def __init__(self) -> None:
        self.asked = 0

    async def find(self) -> Lead:
        self.asked += 1
        assert self.asked < ASKED_MAX, "it asks for ever"
        return Lead(["unix:/nowhere/control.sock"], os.getpid(), 1)

    async def outcome(self) -> None:
        """It has not ended."""

    async def alive(self) -> bool:
        return True


def test_a_coordinator_that_cannot_be_reached_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_driver, "TAKEOVER_TIMEOUT_S", 0.0)
    leaders: Any = OutOfReach()
    with pytest.raises(JobError, match="does not answer: unix:/nowhere"):
        asyncio.run(ray_driver._follow(make_spec(), leaders, "token", None, None))
