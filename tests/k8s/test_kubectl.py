"""Goal: what people see of StreamJobs is true, complete and says what to do. Without an API server."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest

from headgate.errors import UsageError
from headgate.k8s.cli import kubectl
from headgate.k8s.cli import plugin as kubectl_app
from headgate.k8s.kubectl import verbs, views
from headgate.k8s.kubectl.options import extra_of
from headgate.runtime.manifest import load_job
from headgate.tests.k8s.conftest import RESOURCE

Object = dict[str, Any]
NOW_MS = 1_767_268_800_000  # 2026-01-01T12:00:00Z


@pytest.fixture
def job() -> Object:
    """A job that runs."""
    made = copy.deepcopy(RESOURCE)
    made["metadata"] |= {"creationTimestamp": "2025-12-30T12:00:00Z", "generation": 4}
    made["status"] = {
        "observedGeneration": 4,
        "phase": "Running",
        "phaseSince": "2026-01-01T11:00:00.000Z",
        "onDeletion": "a savepoint is taken",
        "run": {
            "number": 3,
            "revision": "1a2b3c4d5e",
            "parallelism": 3,
            "start": {"kind": "Latest"},
            "startedAt": "2026-01-01T10:59:00.000Z",
            "reason": "Upgrade",
        },
        "job": {"id": "u-1-3", "state": "RUNNING", "restarts": 2, "failure": "worker lost"},
        "checkpoint": {
            "id": 17,
            "completedAt": "2026-01-01T11:59:48.000Z",
            "sizeBytes": 14827,
            "path": "s3://b/flights@17",
        },
        "savepoint": {"path": "s3://b/sp-1", "completedAt": "2026-01-01T09:00:00.000Z"},
        "parallelism": {"configured": 3, "current": 2},
        "workers": {"ready": 2, "desired": 3},
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Running",
                "message": "",
                "lastTransitionTime": "2026-01-01T11:00:00.000Z",
                "observedGeneration": 4,
            }
        ],
    }
    return made


def pod(name: str, role: str, **status: Any) -> Object:
    labels = {"headgate.io/job": "flights", "headgate.io/role": role}
    metadata = {"name": name, "labels": labels, "creationTimestamp": "2026-01-01T11:50:00Z"}
    return {"metadata": metadata, "spec": {"nodeName": "node-a"}, "status": status}


def snapshot(name: str, job: str = "flights", **status: Any) -> Object:
    return {
        "metadata": {"name": name, "creationTimestamp": "2026-01-01T08:00:00Z"},
        "spec": {"jobRef": {"name": job}},
        "status": status,
    }


def test_a_row_of_the_table_of_jobs(job: Object) -> None:
    table = views.jobs_table([views.job_view(job)], NOW_MS)
    assert dict(zip(table.titles, table.rows[0], strict=True)) == {
        "name": "flights",
        "phase": "Running",
        "ready": "yes",
        "parallelism": "2 of 3",
        "workers": "2/3",
        "restarts": "2",
        "checkpoint": "17 (12s ago)",
        "age": "2d",
        "message": "",
    }


def test_jobs_of_all_namespaces_have_theirs_in_front(job: Object) -> None:
    table = views.jobs_table([views.job_view(job)], NOW_MS, namespaces=True)
    assert table.titles[:2] == ("namespace", "name")
    assert table.rows[0][:2] == ("air", "flights")


def test_a_long_message_is_cut_in_the_table_and_whole_in_the_view(job: Object) -> None:
    job["status"]["message"] = "the pod\n" + "x" * 200
    view = views.job_view(job)
    cell = views.jobs_table([view], NOW_MS).rows[0][-1]
    assert len(cell) == views.MESSAGE_SHOWN_MAX
    assert cell.startswith("the pod xxx")
    assert cell.endswith("…")
    assert "  " + "x" * 200 in views.job_lines(view, NOW_MS)


def test_the_view_of_one_job_says_what_it_is_and_what_it_was(job: Object) -> None:
    said = "\n".join(views.job_lines(views.job_view(job), NOW_MS))
    assert said.startswith("flights in namespace air: Running for 1h")
    for text in (
        "3, revision 1a2b3c4d5e, because of Upgrade",
        "2 of 3",
        "2/3",
        "worker lost",
        "17 (12s ago), 14,827 B, s3://b/flights@17",
        "s3://b/sp-1",
        "a savepoint is taken",
    ):
        assert text in said
    assert "note:" not in said


def test_the_conditions_have_their_reasons_and_since_when(job: Object) -> None:
    table = views.conditions_table(views.job_view(job).conditions, NOW_MS)
    assert table.rows == [("Ready", "True", "Running", "1h", "")]


def test_a_job_that_no_operator_has_seen_says_so() -> None:
    view = views.job_view(RESOURCE)
    assert view.phase == "Pending"
    assert view.notes == ["no operator has looked at this StreamJob yet: is one running?"]
    row = views.jobs_table([view], NOW_MS).rows[0]
    assert row[3:8] == ("3", "-", "0", "-", "-")


Change = Callable[[Object], None]


def _changed(job: Object) -> None:
    job["metadata"]["generation"] = 5


def _paused(job: Object) -> None:
    job["metadata"]["annotations"] = {"headgate.io/paused": "true"}


def _upgrading(job: Object) -> None:
    at = "2026-01-01T11:59:00.000Z"
    moving = {"verb": "Upgrade", "step": "Save", "startedAt": at, "stepStartedAt": at}
    job["status"]["transition"] = moving | {"message": "a checkpoint is taken"}


def _rolled_back(job: Object) -> None:
    job["status"]["rejected"] = {"revision": "bad", "at": "2026-01-01T11:00:00Z", "reason": "boom"}


def _held(job: Object) -> None:
    said = {"generation": 4, "attempts": 2, "at": "2026-01-01T11:00:00Z", "reason": "no room"}
    job["status"]["held"] = said


def _not_rescaled(job: Object) -> None:
    said = {"parallelism": 9, "attempts": 1, "at": "2026-01-01T11:00:00Z", "error": "no slots"}
    job["status"]["rescale"] = said


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (_changed, "generation 5, observed 4"),
        (_paused, "headgate.io/paused"),
        (_upgrading, "Upgrade is at the step Save: a checkpoint is taken"),
        (_rolled_back, "revision bad was rolled back: boom"),
        (_held, "put off after 2 attempts: no room"),
        (_not_rescaled, "the rescale to 9 failed: no slots"),
    ],
)
def test_what_is_under_way_or_went_wrong_is_noted(job: Object, change: Change, note: str) -> None:
    change(job)
    (said,) = views.job_view(job).notes
    assert note in said


def test_pods_of_the_job_are_shown_head_first_with_their_trouble(job: Object) -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    ready = {"type": "Ready", "status": "True"}
    pods = [
        pod("flights-a", "worker", phase="Running", conditions=[ready]),
        pod("flights-head-0", "head", containerStatuses=[
            {"restartCount": 3, "state": {"waiting": waiting}}
        ]),
        {"metadata": {"name": "stranger", "labels": {"headgate.io/job": "other"}}},
    ]  # fmt: skip
    view = views.job_view(job, pods)
    table = views.pods_table(view.pods, NOW_MS)
    assert table.rows == [
        ("flights-head-0", "head", "Pending", "no", "3", "node-a", "10m"),
        ("flights-a", "worker", "Running", "yes", "0", "node-a", "10m"),
    ]
    assert views.trouble_lines(view.pods) == ["flights-head-0: ImagePullBackOff: no such image"]


def test_snapshots_show_their_path_or_why_there_is_none(job: Object) -> None:
    complete = snapshot("b", phase="Completed", path="s3://b/sp-2", sizeBytes=14827)
    found = [snapshot("a", phase="Failed", message="no room"), complete, snapshot("c", "other")]
    view = views.job_view(job, (), found)
    assert views.snapshots_table(view.snapshots, NOW_MS).rows == [
        ("b", "flights", "Savepoint", "Completed", "14,827 B", "4h", "s3://b/sp-2"),
        ("a", "flights", "Savepoint", "Failed", "-", "4h", "no room"),
    ]


def test_a_change_is_only_over_when_the_operator_has_seen_it(job: Object) -> None:
    assert views.has_come_to(views.job_view(job), "Running")
    job["metadata"]["generation"] = 5
    assert not views.has_come_to(views.job_view(job), "Running")
    assert not views.has_come_to(views.job_view(job), "Suspended")


def test_explain_takes_the_variables_of_the_pods_and_leaves_secrets_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFIX", "of this machine")
    made = copy.deepcopy(RESOURCE)
    made["metadata"]["uid"] = "of the cluster"
    made["spec"]["checkpoint"]["storage"] = "${PREFIX}/${SECRET}"
    made["spec"]["kubernetes"] = {
        "env": {"PREFIX": "s3://pods", "SECRET": {"name": "s", "key": "k"}}
    }
    text, environment = verbs.manifest_of(made)
    assert environment == {"PREFIX": "s3://pods", "SECRET": "${SECRET}"}
    assert "of the cluster" not in text
    assert "s3://pods/${SECRET}" in load_job(text, env=environment).explain()


@pytest.mark.parametrize("verb", [command.name for command in kubectl_app.registered_commands])
def test_every_verb_has_help(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl-headgate", verb, "--help"])
    with pytest.raises(SystemExit) as ended:
        kubectl()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"kubectl headgate {verb}" in said
    assert "--namespace" in said
    assert "--kubeconfig" in said


def test_without_the_extra_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("headgate.k8s")]:
        if name.endswith((".api", ".cluster", ".forward", ".logs")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    monkeypatch.setattr(sys, "argv", ["kubectl-headgate", "status"])
    with pytest.raises(SystemExit) as ended:
        kubectl()
    assert ended.value.code == 2
    assert "pip install 'headgate[k8s]'" in capsys.readouterr().err


def test_a_module_of_ours_that_is_missing_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError), extra_of("the test"):
        raise ModuleNotFoundError(name="headgate.k8s.nothing")
    with (
        pytest.raises(UsageError, match="the test needs the package aiohttp"),
        extra_of("the test"),
    ):
        raise ModuleNotFoundError(name="aiohttp")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status", "clicks", "-A"), "use -n instead of -A"),
        (("logs", "clicks", "--role", "heads"), "one of head, worker"),
        (("logs", "clicks", "-f", "-p"), "keep -f or -p"),
        (("savepoint", "clicks", "--timeout", "soon"), "--timeout"),
        (("status", "--kubeconfig", "/nowhere/config"), "there is no file /nowhere/config"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said_before_anything_is_asked(
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl-headgate", *arguments])
    with pytest.raises(SystemExit) as ended:
        kubectl()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
