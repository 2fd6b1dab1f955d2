"""`headgate k8s head`: settings, commands, and what a run begins with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headgate.errors import (
    CorruptError,
    FencedError,
    HeadgateError,
    JobError,
    ManifestErrors,
    MissingFileError,
    StateError,
    StorageError,
)
from headgate.k8s import cli, ports
from headgate.k8s.head import (
    HeadRun,
    Logged,
    beginning,
    exit_code,
    settings,
    with_place_for_savepoints,
)
from headgate.k8s.pods import GRACE_S
from headgate.k8s.ray_node import start_head
from headgate.k8s.worker_process import GRACE_S as WORKER_GRACE_S
from headgate.runtime.options.recovery import SHUTDOWN_GRACE
from headgate.runtime.options.registry import Options
from headgate.runtime.protocol import names

RUN = HeadRun("flights", "air", "u-1-4", 3)
SAVEPOINT = "s3://bucket/sp"


@pytest.mark.parametrize("mode", ["Managed", "KubeRay", "External"])
def test_the_settings_are_options_with_the_ports_of_the_table(mode: str) -> None:
    said = settings(replace(RUN, mode=mode))  # type: ignore[arg-type]
    assert list(Options.problems(said)) == []
    assert said["rest.address"] == "flights-head.air.svc"
    assert said["rest.port"] == str(ports.REST.number)
    assert said["headgate.control.token-file"] == "/run/headgate/auth_token"
    own_nodes = mode != "External"
    assert ("taskmanager.data.port" in said) == own_nodes
    assert ("headgate.ray.slot-resource" in said) == own_nodes


def test_there_is_time_to_leave_before_the_pod_is_killed() -> None:
    leave_s = Options(settings(RUN)).get(SHUTDOWN_GRACE) / 1000
    assert leave_s < WORKER_GRACE_S < GRACE_S


def test_the_head_of_ray_hosts_no_workers() -> None:
    command = start_head("10.1.2.3")
    assert {"--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"} <= set(command)
    assert "--no-monitor" in command
    assert not any(each.startswith("--resources") for each in command)
    joined = start_head("10.1.2.3", "ray.example:6379")
    assert {"--address=ray.example:6379", "--num-cpus=0"} <= set(joined)
    assert "--labels=headgate.io/hosts-workers=never" in joined
    assert "--head" not in joined


def test_what_a_run_begins_with() -> None:
    def restored(run: HeadRun, began_with: str = "") -> object:
        return beginning(run, Logged("u-1-3", began_with))["restore_from"]

    assert restored(RUN) is None
    assert restored(replace(RUN, start="path", path=SAVEPOINT)) == SAVEPOINT
    # The operator does not know whether a run that began with a savepoint came to a checkpoint.
    assert restored(replace(RUN, path=SAVEPOINT)) is None
    assert restored(replace(RUN, path=SAVEPOINT), "s3://bucket/other") is None
    assert restored(replace(RUN, path=SAVEPOINT), SAVEPOINT) == SAVEPOINT
    assert beginning(replace(RUN, start="nothing"), Logged())["fresh"] is True
    assert beginning(RUN, Logged())["fresh"] is False


@pytest.mark.parametrize(
    ("logged", "taken_over"),
    [("u-1-3", True), ("u-1-4", True), ("u-2-3", False), ("by-hand", False), ("", False)],
)
def test_only_runs_of_the_same_stream_job_are_taken_over(logged: str, taken_over: bool) -> None:
    assert beginning(RUN, Logged(logged))["take_over"] is taken_over


@pytest.mark.parametrize("in_a_pod", [True, False])
def test_the_error_of_a_head_that_cannot_begin_is_its_termination_message(
    in_a_pod: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, job = tmp_path / "termination-log", tmp_path / "job.yaml"
    if in_a_pod:
        said.write_text("something longer of the run before" * 20)
    monkeypatch.setattr(cli, "TERMINATION_LOG", said)
    monkeypatch.setenv("HEADGATE_POD_IP", "10.1.2.3")
    job.write_text("[]")
    command = ["head", "--job", str(job), "--run-id", "u-1", "--parallelism", "1"]
    assert CliRunner().invoke(cli.app, command).exit_code == 2
    assert said.exists() == in_a_pod
    if in_a_pod:
        assert said.read_text() == f"not a StreamJob path=`{job}`"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ManifestErrors([]), 2),
        (StateError("another number of key groups"), 2),
        (CorruptError("the job log is damaged"), 2),
        (MissingFileError("a state file is missing"), 2),
        (StorageError("the bucket does not answer"), 1),
        (FencedError("a newer coordinator owns the job"), 1),
        (JobError("Ray has ended by itself"), 1),
    ],
)
def test_the_exit_code_says_whether_the_next_start_would_end_in_the_same_way(
    error: HeadgateError, code: int
) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize(("damage", "code"), [("a log of others", 2), ("no log can be read", 1)])
def test_a_head_reads_the_log_before_anything_else(
    damage: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [{"name": "data", "mountPath": str(tmp_path)}]
    template = {"spec": {"containers": [{"name": "headgate", "volumeMounts": mounts}]}}
    spec = {
        "checkpoint": {"every": "1s", "storage": str(tmp_path)},
        "sources": {"rows": {"generator": {"fields": {"n": "int"}, "rows": 1}}},
        "sinks": {"out": {"from": "rows", "print": {}}},
        "kubernetes": {role: {"podTemplate": template} for role in ("coordinator", "workers")},
    }
    manifest = tmp_path / "job.yaml"
    resource = {"apiVersion": "headgate.io/v1alpha1", "kind": "StreamJob", "spec": spec}
    manifest.write_text(
        yaml.safe_dump({**resource, "metadata": {"name": "flights", "namespace": "air"}})
    )
    log = tmp_path / names.job_dir("flights") / "log"
    log.parent.mkdir()
    if code == 2:
        entry = log.parent / names.log_entry(1)
        entry.parent.mkdir()
        entry.write_text("{}")
    else:
        log.write_text("this is no directory")
    monkeypatch.setenv("HEADGATE_POD_IP", "10.1.2.3")
    command = ["head", "--job", str(manifest), "--run-id", "u-1", "--parallelism", "1"]
    ran = CliRunner().invoke(cli.app, command)
    assert ran.exit_code == code, ran.output
    assert str(log.parent) in ran.output


def test_savepoints_go_beside_the_checkpoints_unless_an_option_says_where() -> None:
    key = "execution.checkpointing.savepoint-dir"
    assert with_place_for_savepoints({"a": "b"}, "s3://bucket/x/") == {
        "a": "b",
        key: "s3://bucket/x/savepoints",
    }
    assert with_place_for_savepoints({key: "s3://b/sp"}, "s3://bucket/x") == {key: "s3://b/sp"}
