"""`headgate k8s head`: settings, commands, and what a run begins with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.k8s import ports
from headgate.k8s.head import HeadRun, Logged, beginning, settings, start_ray
from headgate.runtime.options import Options

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


def test_the_head_of_ray_hosts_no_workers() -> None:
    command = start_ray("10.1.2.3")
    assert {"--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"} <= set(command)
    assert not any(each.startswith("--resources") for each in command)
    joined = start_ray("10.1.2.3", "ray.example:6379")
    assert {"--address=ray.example:6379", "--num-cpus=0"} <= set(joined)
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
