"""Adoption of attempts by a new coordinator, and its reasons to restart the job instead."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headgate.runtime.protocol.adoption import (
    Adopted,
    Refused,
    WorkerReport,
    decide,
    refusal_by_log,
)
from headgate.runtime.protocol.checkpoints.manifest import Manifest
from headgate.runtime.protocol.joblog import (
    ENTRIES,
    AttemptDeployed,
    CheckpointEntry,
    DeploymentRecord,
    GenerationStarted,
    JobEnded,
    JobStatus,
    LogView,
    apply_trim,
    fold,
)

SUBTASKS = [(0, 0), (0, 1), (1, 0), (1, 1)]
DEPLOYMENT = DeploymentRecord(
    attempt=65537, workers=("a", "b"), plan="shape", parallelism=2, max_parallelism=8
)


def started(generation: int, run: str = "run", parallelism: int = 2) -> GenerationStarted:
    return GenerationStarted(
        generation=generation,
        writer=f"w{generation}",
        started_ms=generation,
        job_fingerprint="",
        parallelism=parallelism,
        max_parallelism=8,
        run=run,
    )


def deployed(deployment: DeploymentRecord = DEPLOYMENT) -> AttemptDeployed:
    return AttemptDeployed(generation=1, writer="w1", deployment=deployment)


def completed(id_: int, **changes: Any) -> CheckpointEntry:
    manifest = Manifest(
        checkpoint_id=id_, trigger_ms=1, completed_ms=2, duration_ms=1, max_parallelism=8
    )
    entry = CheckpointEntry(
        generation=1,
        writer="w1",
        checkpoint_id=id_,
        manifest=manifest,
        completed_ms=2,
        run="run",
        parallelism=2,
        deployment=DEPLOYMENT,
    )
    return msgspec.structs.replace(entry, **changes)


def view_of(*entries: Any) -> LogView:
    view = LogView()
    for entry in entries:
        view = fold(view, ENTRIES.decode(ENTRIES.encode(entry), "entry"))
    return view


def report(worker: int, **changes: Any) -> WorkerReport:
    mine = WorkerReport(
        attempt=65537, plan="shape", running=True, subtasks=((0, worker), (1, worker))
    )
    return msgspec.structs.replace(mine, **changes)


def judge(view: LogView, **changes: Any) -> Adopted | Refused:
    """Both workers are there; the second differs by `changes`."""
    return decide(view, SUBTASKS, {"a": report(0), "b": report(1, **changes)})


VIEW = view_of(started(1), deployed(), completed(1), completed(2), started(2))


def test_a_healthy_attempt_goes_on() -> None:
    found = judge(VIEW, last_checkpoint=5, finished=((0, 1),), orphaned_ms=70)
    assert found == Adopted(
        finished=frozenset({(0, 1)}),
        last_checkpoint=5,
        completed=2,
        aborted=(3, 4, 5),
        base=2,
        committed=2,
        orphaned_ms=70,
    )


def test_without_a_checkpoint_of_its_own_it_builds_on_what_it_restored() -> None:
    other = msgspec.structs.replace(DEPLOYMENT, restored_checkpoint=2, attempt=65537)
    entries = (started(1), deployed(), completed(2))
    found = judge(view_of(*entries, deployed(other), started(2)), last_checkpoint=3)
    assert isinstance(found, Adopted)
    assert (found.completed, found.base, found.committed, found.aborted) == (0, 2, 2, (3,))


def test_an_older_checkpoint_that_was_restored_instead_of_the_newest_is_no_base() -> None:
    other = msgspec.structs.replace(DEPLOYMENT, restored_checkpoint=1)
    entries = (started(1), deployed(), completed(1), completed(2))
    found = judge(view_of(*entries, deployed(other), started(2)))
    assert isinstance(found, Adopted)
    assert (found.completed, found.base, found.last_checkpoint) == (0, 0, 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attempt": 0}, "runs nothing"),
        ({"attempt": 65538}, "another attempt"),
        ({"plan": "other"}, "another attempt"),
        ({"running": False}, "had not begun"),
        ({"failure": "map: no"}, "failed meanwhile: map: no"),
        ({"ending": "its sources were drained"}, "continue it: its sources were drained"),
        ({"subtasks": ((0, 1),)}, "not those of the plan"),
        ({"subtasks": ((0, 0), (0, 1), (1, 1))}, "not those of the plan"),
    ],
)
def test_anything_else_is_restarted(changes: dict[str, Any], reason: str) -> None:
    found = judge(VIEW, **changes)
    assert isinstance(found, Refused)
    assert reason in found.reason


def test_a_worker_that_cannot_be_reached_is_missed() -> None:
    found = decide(VIEW, SUBTASKS, {"a": report(0, subtasks=tuple(SUBTASKS))})
    assert found == Refused("1 of 2 workers are gone: b")


@pytest.mark.parametrize(
    ("view", "plan", "reason"),
    [
        (VIEW, "shape", ""),
        (VIEW, "other", "another plan"),
        (view_of(started(1), started(2)), "shape", "no deployment"),
        (
            view_of(started(1, "before"), deployed(), started(2)),
            "shape",
            "another run",
        ),
        (
            view_of(started(1), deployed(), completed(1, parallelism=3), started(2, parallelism=3)),
            "shape",
            "rescaled",
        ),
        (
            view_of(
                started(1),
                deployed(),
                deployed(msgspec.structs.replace(DEPLOYMENT, in_parts=True)),
                started(2),
            ),
            "shape",
            "regions were restarted",
        ),
        (
            view_of(started(1), deployed(), completed(1, is_final=True), started(2)),
            "shape",
            "last checkpoint",
        ),
    ],
)
def test_what_the_log_rules_out(view: LogView, plan: str, reason: str) -> None:
    found = refusal_by_log(view, "run", plan)
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_trimmed_log_still_has_the_deployment() -> None:
    whole = view_of(started(1), deployed(), completed(1), completed(2))
    trimmed = fold(LogView.beginning_at(4), completed(2))
    assert trimmed.deployment == apply_trim(whole, 4).deployment == DEPLOYMENT
    assert trimmed.deployment_completed == whole.deployment_completed == 2


def test_nothing_of_a_job_that_has_ended_is_adopted() -> None:
    end = JobEnded(
        generation=1, writer="w1", status=JobStatus.FINISHED, reason="", ended_ms=1, run="run"
    )
    assert view_of(started(1), deployed(), end).deployment is None
