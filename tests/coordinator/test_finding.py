"""The address that the job log leads to, seen from the coordinator's machine and from others."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headgate.errors import HeadgateError, JobError, UsageError
from headgate.runtime.finding import Where, found_in_storage
from headgate.runtime.protocol.joblog import Leader, LogView
from headgate.runtime.storage.stored_jobs import StoredJob

HERE = socket.gethostname()
UNIX, LOOPBACK, NODE = "unix:/run/job.rest", "tcp:127.0.0.1:8081", "tcp:10.0.0.7:8081"
CONTROL = ("unix:/run/job.sock", "tcp:10.0.0.7:6123")


@pytest.fixture(autouse=True)
def own_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path / "run"))


def led_by(host: str, *rest: str, token: str = "secret") -> StoredJob:
    leader = Leader(host=host, pid=7, started_ms=1, addresses=CONTROL, rest=rest)
    return StoredJob("clicks", "file:///checkpoints/clicks", LogView(), leader, (), token)


def test_a_stored_job_does_not_show_the_token() -> None:
    assert "secret" not in repr(led_by(HERE))
    assert StoredJob("clicks", "file:///checkpoints/clicks", LogView(), None, ()).token == ""


@pytest.mark.parametrize(
    ("host", "found"), [(HERE, (UNIX, LOOPBACK, NODE)), ("elsewhere", (NODE,))]
)
def test_what_is_local_to_another_machine_does_not_get_the_token(
    host: str, found: tuple[str, ...]
) -> None:
    place = found_in_storage(led_by(host, UNIX, LOOPBACK, NODE), Where())
    assert (place.addresses, place.token) == (found, "secret")


@pytest.mark.parametrize(
    ("job", "kind", "text"),
    [
        (led_by("elsewhere", UNIX, LOOPBACK), JobError, "listens to its own machine only"),
        (led_by(HERE), JobError, "the job runs an older version of headgate"),
        (led_by(HERE, UNIX, token=""), UsageError, "the token of the job's coordinator cannot be"),
    ],
)
def test_a_job_that_cannot_be_asked_from_here_says_why(
    job: StoredJob, kind: type[HeadgateError], text: str
) -> None:
    with pytest.raises(kind, match=text) as refused:
        found_in_storage(job, Where())
    assert refused.value.fix
