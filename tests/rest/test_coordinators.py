"""Goal: the operator sees in the REST API of a real job what it decides from."""

from __future__ import annotations

import base64
import copy
import hashlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.k8s.actions import CallJob, JobReport, Observed
from headgate.k8s.conditions import report_conditions
from headgate.k8s.context import Context
from headgate.k8s.objects import Settings
from headgate.k8s.operator.coordinators import RestCoordinators
from headgate.k8s.operator.kinds import Kind
from headgate.k8s.reconcile import reconcile
from headgate.k8s.snapshots import FINALIZER, SnapshotView, reconcile_snapshot
from headgate.k8s.spec import Job, parse_job
from headgate.k8s.status import (
    Run,
    Start,
    StreamJobStatus,
    StreamSnapshotStatus,
    Transition,
    Verb,
    condition,
    rfc3339,
)
from headgate.k8s.transitions import trigger_of
from headgate.runtime.rest.answers import CheckpointCommand, JobAnswer, SavepointCommand
from headgate.tests.k8s.conftest import RESOURCE
from headgate.tests.rest.conftest import serving

NOW_MS = 1_700_000_000_000
UID = "6ff1a0a6-5a3b-4f3c-9d0e-2f1f6d3b9c11"
"""As the API server makes them."""
SNAPSHOT: dict[str, Any] = {
    "apiVersion": "headgate.io/v1alpha1",
    "kind": "StreamSnapshot",
    "metadata": {"name": "s", "namespace": "air", "uid": UID, "finalizers": [FINALIZER]},
    "spec": {"jobRef": {"name": "flights"}},
}


class Objects:
    """The StatefulSet and the Secret of a job, as the API server has them."""

    def __init__(self, token: str) -> None:
        volume = {"name": "token", "secret": {"secretName": "clicks-token"}}
        self._head = {"spec": {"template": {"spec": {"volumes": [volume]}}}}
        self._secret = {"data": {"auth_token": base64.b64encode(token.encode()).decode()}}

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        found = {"clicks-head": self._head, "clicks-token": self._secret}
        return found.get(name)


def coordinators_of(api: Any) -> RestCoordinators:
    """An operator that has just started, and knows nothing of earlier requests."""
    return RestCoordinators(Objects(api.token), lambda namespace, job: api.url)


def failing_job(lab: Any, **checkpoint: Any) -> hg.Job:
    options = {"execution.checkpointing.incremental": "false"}
    job = hg.Job("clicks", parallelism=1, options=options)
    job.checkpoint(every="1h", storage=lab.storage, **checkpoint)
    job.restart(attempts=20, delay="10ms")
    (
        job.read(from_list([{"user": n % 3} for n in range(200)], batch_rows=10), name="events")
        .map(lambda r: (r["user"], hashlib.shake_256(str(r).encode()).digest(30_000)))
        .key_with(lambda r: r[0])
        .reduce(lambda a, b: b, name="count")
        .write(blackhole(), name="out")
    )
    return job


async def with_state(client: Any) -> None:
    """Take checkpoints until one has the state of the step, which is written to a file."""
    for number in itertools.count():
        command = CheckpointCommand(trigger_id=f"state-{number}")
        if (await client.carry_out(command))["size_bytes"] > 5000:
            return


def checkpointing(report: JobReport) -> tuple[str, str]:
    """The condition that a StreamJob gets from this answer."""
    status = StreamJobStatus(run=Run(1, "r", 1, Start("Latest"), rfc3339(NOW_MS)))
    resource = copy.deepcopy(RESOURCE)
    seen = Observed(job=replace(report, run_id="u-1-1"))
    context = Context(resource, status, seen, NOW_MS, Settings())
    report_conditions(context, [], paused=False)
    found = condition(status.conditions, "CheckpointingHealthy")
    assert found is not None
    return found.status, found.message


def test_a_request_that_is_wrong_is_told_apart_from_one_that_fails(lab: Any, trouble: Any) -> None:
    trouble.only = "-0000-"  # the state files of the first worker

    async def script(job: Any) -> None:
        async with serving(job) as api, api.client() as client:
            await job.until("status", status="RUNNING")
            await with_state(client)
            await client.begin(SavepointCommand(trigger_id="nowhere"))
            trouble.fail["write_file"] = 1
            await client.begin(CheckpointCommand(trigger_id="away"))
            for trigger in ("nowhere", "away"):
                await client.operation(trigger, wait_s=60)
            report = await coordinators_of(api).report("air", "clicks")
            assert report is not None
            wrong, away = report.operations["nowhere"], report.operations["away"]
            assert (wrong.state, wrong.lasting) == ("failed", True)
            assert "nobody says where savepoints go" in wrong.error
            assert (away.state, away.lasting) == ("failed", False)

    lab.run(failing_job(lab, tolerable_failures=5), script, opener=trouble.open)


def test_checkpointing_becomes_unhealthy_and_healthy_again(lab: Any, trouble: Any) -> None:
    trouble.only = "-0000-"  # the state files of the first worker

    async def script(job: Any) -> None:
        async with serving(job) as api, api.client() as client:
            await job.until("status", status="RUNNING")
            coordinators = coordinators_of(api)

            async def report() -> JobReport:
                found = await coordinators.report("air", "clicks")
                assert found is not None
                return found

            assert checkpointing(await report()) == ("True", "no checkpoint yet")
            await with_state(client)
            trouble.fail["write_file"] = 2
            for number in ("1", "2"):
                await client.begin(CheckpointCommand(trigger_id=number))
                await client.operation(number, wait_s=60)
                assert (await report()).failed_checkpoints == int(number)
            healthy, why = checkpointing(await report())
            assert healthy == "False"
            assert "2 checkpoints in a row have failed, the last one: " in why
            assert "StorageError: injected" in why
            done = await client.carry_out(CheckpointCommand(trigger_id="3"))
            seen = await report()
            number = done["checkpoint"]
            assert checkpointing(seen) == ("True", f"checkpoint {number} is complete")
            assert seen.checkpoint is not None
            assert seen.checkpoint.path == done["path"]
            assert done["path"].endswith(f"@{number}")
            assert seen.checkpoint.size_bytes == done["size_bytes"] > 5000
            assert (await client.checkpoint_detail(number)).external_path == done["path"]

    ran = lab.run(failing_job(lab, tolerable_failures=5), script, opener=trouble.open)
    assert ran.outcome.status == "FINISHED"


def test_failed_checkpoints_are_counted_across_restarts_of_the_job(lab: Any, trouble: Any) -> None:
    """A job that restarts for each of them would look healthy for ever."""
    trouble.only = "-0000-"  # the state files of the first worker

    async def script(job: Any) -> None:
        async with serving(job) as api, api.client() as client:
            await job.until("status", status="RUNNING")
            await with_state(client)
            trouble.fail["write_file"] = 2
            for number in ("1", "2"):
                await client.begin(CheckpointCommand(trigger_id=number))
                await job.until("failure")
                await job.until("status", status="RUNNING")
            report = await coordinators_of(api).report("air", "clicks")
            assert report is not None
            assert report.failed_checkpoints == 2
            assert report.state == "RUNNING"
            # It runs again, and what went wrong last can still be seen.
            assert "checkpoint coordinator: too many checkpoints failed" in report.failure

    ran = lab.run(failing_job(lab), script, opener=trouble.open)
    assert ran.outcome.status == "FINISHED"


def test_a_restarting_job_says_why() -> None:
    resource = copy.deepcopy(RESOURCE)
    job = parse_job(resource)
    assert isinstance(job, Job)
    run = Run(1, job.revision, 1, Start("Latest"), rfc3339(NOW_MS), ran=True)
    report = JobReport("u-1-1", "RESTARTING", 1, failure="map (0): the function raised KeyError")
    status = StreamJobStatus(run=run)
    result = reconcile(resource, status, Observed(job=report), NOW_MS, Settings())
    degraded = condition(result.status.conditions, "Degraded")
    assert degraded is not None
    assert (degraded.status, degraded.message) == (
        "True",
        "run 1: the job is RESTARTING: map (0): the function raised KeyError",
    )


def test_the_end_of_a_job_is_told_apart_from_its_failure() -> None:
    from headgate.k8s.operator.coordinators import _report

    stopped = JobAnswer(name="x", status="SUSPENDED", reason="stopped with checkpoint 5")
    assert _report(stopped, {}).failure == ""
    failed = JobAnswer(name="x", status="FAILED", reason="no attempts left", failure="map: boom")
    assert _report(failed, {}).failure == "map: boom; no attempts left"


@pytest.mark.parametrize("status", ["RECONCILING", "FAILING", "RESTARTING", "HANDED_OVER"])
def test_a_snapshot_waits_for_a_job_that_comes_back(status: str) -> None:
    """A coordinator that takes over answers RECONCILING; the snapshot was abandoned then."""
    from headgate.k8s.operator.coordinators import _report

    before = StreamSnapshotStatus(phase="Running", attempts=1)
    view = SnapshotView(RESOURCE, _report(JobAnswer(name="flights", status=status, run="r"), {}))
    after = reconcile_snapshot(SNAPSHOT, before, view, NOW_MS, Settings()).status
    assert after.phase == "Running", after.message


def test_operations_are_seen_by_an_operator_that_did_not_begin_them(
    with_api: Any, tmp_path: Path
) -> None:
    """Also with their sizes, which were 0."""

    async def script(api: Any) -> None:
        first = coordinators_of(api)
        report = await first.report("air", "clicks")
        assert report is not None
        commands = {
            f"{UID}-1": ("savepoint", {"directory": str(tmp_path), "native": False}),
            f"{UID}-2": ("checkpoint", {}),
            f"{UID}-stop": ("stop", {"savepoint": True, "directory": str(tmp_path)}),
        }
        async with api.client() as client:
            for trigger, (verb, arguments) in commands.items():
                await first.call("air", "clicks", CallJob(report.run_id, verb, trigger, arguments))  # type: ignore[arg-type]
                await client.operation(trigger, wait_s=60)
        seen = await coordinators_of(api).report("air", "clicks")
        assert seen is not None
        assert list(seen.operations) == list(commands)
        for operation in seen.operations.values():
            assert operation.state == "completed", operation
            assert operation.size_bytes > 0
            assert operation.checkpoint_id > 0
            assert operation.path
        assert seen.operations[f"{UID}-1"].path.startswith(str(tmp_path))
        assert seen.operations[f"{UID}-2"].path.endswith("@2")

    with_api(script)


def test_another_run_is_not_asked(with_api: Any) -> None:
    async def script(api: Any) -> None:
        coordinators = coordinators_of(api)
        with pytest.raises(hg.errors.JobError, match="answers, not u-1-7"):
            await coordinators.call("air", "clicks", CallJob("u-1-7", "checkpoint", "t", {}))
        seen = await coordinators.report("air", "clicks")
        assert seen is not None
        assert seen.operations == {}

    with_api(script)


class TestTriggerIds:
    """What the operator makes is what the REST API takes."""

    @staticmethod
    def made() -> list[str]:
        """One of each kind, as long as they can be."""
        resource = copy.deepcopy(RESOURCE)
        resource["metadata"] |= {
            "uid": UID,
            "generation": 2**53,
            "finalizers": ["headgate.io/state"],
        }
        job = parse_job(resource)
        assert isinstance(job, Job)
        run = Run(10**9, job.revision, 2, Start("Latest"), rfc3339(NOW_MS), rfc3339(NOW_MS), True)
        found = []
        verbs: tuple[Verb, ...] = ("Suspend", "Upgrade", "Restore", "Delete")
        for verb in verbs:
            transition = Transition(verb, "Save", rfc3339(NOW_MS), rfc3339(NOW_MS))
            status = StreamJobStatus(run=run, transition=transition)
            context = Context(resource, status, Observed(), NOW_MS, Settings())
            found.append(trigger_of(context, transition))
        kubernetes = {
            "ray": {"mode": "External", "address": "ray:6379", "tokenSecretRef": {"name": "t"}}
        }
        resource["spec"]["kubernetes"] = kubernetes
        job = parse_job(resource)
        assert isinstance(job, Job), job
        run.revision = job.revision
        report = JobReport(f"{UID}-{10**9}", "RUNNING", 2)
        decided = reconcile(
            resource, StreamJobStatus(run=run), Observed(job=report), NOW_MS, Settings()
        )
        found += [each.trigger_id for each in decided.actions if isinstance(each, CallJob)]
        before = StreamSnapshotStatus(phase="Running", attempts=10**6)
        view = SnapshotView(resource, report)
        taken = reconcile_snapshot(SNAPSHOT, before, view, NOW_MS, Settings())
        return found + [each.trigger_id for each in taken.actions if isinstance(each, CallJob)]

    def test_those_of_the_operator_are_taken(self) -> None:
        made = self.made()
        assert [each.removeprefix(UID).strip("-0123456789") for each in made] == [
            *("suspend", "upgrade", "restore", "delete", "rescale"),
            "",
        ]
        for each in made:
            body = msgspec.json.encode({"triggerId": each})
            assert msgspec.json.decode(body, type=CheckpointCommand).trigger_id == each

    @pytest.mark.parametrize("good", ["a", ".a", "a.", "...", "A-b_c.9", "x" * 128])
    def test_good(self, good: str) -> None:
        body = msgspec.json.encode({"triggerId": good})
        assert msgspec.json.decode(body, type=CheckpointCommand).trigger_id == good

    @pytest.mark.parametrize("wrong", ["", ".", "..", "a\n", "a/b", "a b", "é", "x" * 129])
    def test_wrong(self, wrong: str) -> None:
        """`a` with a line break was taken, and then broke the header `Location`."""
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode({"triggerId": wrong}), type=CheckpointCommand)
