"""`headgate k8s head`: the commands that it runs."""

from __future__ import annotations

from dataclasses import replace

from headgate.k8s import ports
from headgate.k8s.head_commands import HeadRun, run_job, settings, start_head
from headgate.runtime.options import Options

RUN = HeadRun("/etc/headgate/job.yaml", "flights", "air", "u-1-4", 3, "latest")


def test_the_settings_are_options_with_the_ports_of_the_table() -> None:
    said = settings(RUN)
    assert list(Options.problems(said)) == []
    assert said["rest.address"] == "flights-head.air.svc"
    assert said["rest.port"] == str(ports.REST.number)
    assert said["taskmanager.data.port"] == str(ports.EXCHANGE.number)
    assert said["headgate.control.token-file"] == "/run/headgate/auth_token"


def test_the_head_of_ray_hosts_no_workers() -> None:
    command = start_head("10.1.2.3")
    assert {"--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"} <= set(command)
    assert not any(each.startswith("--resources") for each in command)


def test_what_a_run_begins_with() -> None:
    def start(run: HeadRun) -> list[str]:
        command = run_job(run, "10.1.2.3")
        return command[command.index("3") + 1 : command.index("-D")]

    savepoint = "s3://bucket/sp"
    assert run_job(RUN, "10.1.2.3")[3:7] == ["--cluster", "10.1.2.3:6379", "--run-id", "u-1-4"]
    assert start(RUN) == []
    assert start(replace(RUN, start="nothing")) == ["--fresh"]
    assert start(replace(RUN, start="path", path=savepoint)) == ["--from", savepoint]
    assert start(replace(RUN, path=savepoint)) == []
    assert start(replace(RUN, path=savepoint, began_with=savepoint)) == ["--from", savepoint]
    assert start(replace(RUN, allow_non_restored_state=True)) == ["--allow-non-restored-state"]
