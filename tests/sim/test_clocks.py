"""Clocks that somebody sets: timestamps may be wrong, and nothing else."""

from __future__ import annotations

from unittest import mock

from headgate.tests.sim import nemesis, run
from headgate.tests.sim.__main__ import explain
from headgate.tests.sim.run import Simulation, simulate


async def set_back(sim: Simulation) -> None:
    """By an hour, on the machine of the coordinator."""
    sim.leader.process.clock_ms -= 3_600_000


def test_a_job_goes_on_when_a_clock_is_set() -> None:
    """Without an end of the data only checkpoints make anything visible: they come as before."""
    plan = nemesis.Plan(frozenset({"set_back"}), 0.1, 3.0)
    with (
        mock.patch.object(run, "BOUNDED_RATE", 0.0),
        mock.patch.object(nemesis, "ACTS", (set_back,)),
        mock.patch.object(nemesis, "draw_plan", return_value=plan),
    ):
        result = simulate(1, kind="count")
    assert result.seen["set_back"] > 3
    assert not result.violations, explain(result)


def test_restarts_come_in_time_when_a_clock_is_set() -> None:
    """Also those that were decided before it was, and those that are decided next."""
    acts = (set_back, nemesis.kill_worker)
    plan = nemesis.Plan(frozenset(act.__name__ for act in acts), 0.1, 3.0)
    with (
        mock.patch.object(nemesis, "ACTS", acts),
        mock.patch.object(nemesis, "draw_plan", return_value=plan),
    ):
        result = simulate(1, kind="count")
    assert result.seen["restart"] > 1
    assert not result.violations, explain(result)
