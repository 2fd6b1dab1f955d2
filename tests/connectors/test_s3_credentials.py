"""Credentials that S3 refuses are errors with the reason, by the conformance kit.

The client keeps the credentials that a process has used first, so each check has a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate.connectors import files_source
from headgate.operators.connections import check_connection
from headgate.operators.sink import Sink
from headgate.operators.source import Source
from headgate.testing.connectors import sink_checks, source_checks
from headgate.testing.connectors.refusals import expect_no_secrets, refused
from headgate.testing.servers.versitygw import ACCESS, BUCKET, BUILD_S_MAX, S3Gateway, running
from headgate.tests.support.connector_cases import SCHEMA
from headgate.tests.support.s3_cases import S3Sink, S3Source
from headgate.tests.support.skips import available

WRONG = "a secret key that is not the right one"
REASON = "the credentials"
"""A part of what to do, because an answer to HEAD has no reason."""
MISTAKES = ("no such user", "a wrong secret")
SECONDS_MAX = 240
pytestmark = [pytest.mark.server, pytest.mark.timeout(BUILD_S_MAX + SECONDS_MAX + 60)]


class _Port:
    """The server of another process."""

    def __init__(self, port: int) -> None:
        self.port = port


class _Refused:
    """Nothing can be put, because the process has no credentials that are right."""

    secrets = (WRONG,)

    @contextmanager
    def place(self) -> Iterator[str]:
        yield "nothing"


class RefusedSource(_Refused, S3Source):
    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        made = files_source(format="json", schema=SCHEMA, **self.files(place))
        return {"wrong credentials": (made, REASON)}


class RefusedSink(_Refused, S3Sink):
    def mistakes(self, place: str) -> Mapping[str, tuple[Sink, str]]:
        return {"wrong credentials": (self.sink(place, "exactly_once"), REASON)}


KINDS: dict[str, Any] = {"source": RefusedSource, "sink": RefusedSink}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Gateway]:
    """A running server."""
    with available(running(tmp_path_factory.mktemp("s3") / "objects")) as gateway:
        yield gateway


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_credentials_are_told(
    server: S3Gateway, kind: str, mistake: str, tmp_path: Path
) -> None:
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("AWS_")},
        "AWS_ACCESS_KEY_ID": ACCESS if mistake == "a wrong secret" else "nobody",
        "AWS_SECRET_ACCESS_KEY": WRONG,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, kind, str(server.port)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


async def check_refusals(kind: str, port: int) -> None:
    """Check what a run and the check of a connection say in this process."""
    case = KINDS[kind](_Port(port))
    checks: list[Any] = [*(source_checks() if kind == "source" else sink_checks())]
    (check,) = [each for each in checks if each.name == "says_what_is_wrong"]
    await check.run(case)
    ((connector, _),) = case.mistakes("nothing").values()
    error = await refused(asyncio.to_thread(check_connection, connector, {}), "the check")
    assert REASON in str(error), error
    expect_no_secrets(case, "the check of the connection", str(error))
    assert BUCKET in str(error), error


if __name__ == "__main__":
    asyncio.run(check_refusals(sys.argv[1], int(sys.argv[2])))
