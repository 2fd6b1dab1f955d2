"""`headgate k8s delete-state` on real S3 servers: it deletes what it may, and never a savepoint.

moto is S3 as far as headgate needs it. versitygw is a server over a directory. A job would refuse it,
because it gives one name to two writers; a deletion needs nothing of that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.k8s.cli import app
from headgate.operators.clock import SystemClock
from headgate.runtime.protocol import names
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.open_store import open_store
from headgate.testing.servers import versitygw
from headgate.testing.servers.process import START_S_MAX
from headgate.testing.servers.programs import NotAvailableError
from headgate.tests.conftest import S3Server
from headgate.tests.k8s.conftest import RESOURCE

KEPT = (
    "flights/savepoint-flights-0123456789ab/_metadata",
    "flights/notes.txt",
    "flights-2/log/generation/1",
    "savepoints/savepoint-flights-99/_metadata",
)
"""Files of others, and savepoints within the directory of the job and beside it."""
OWN_MANY = 1100
"""More objects than one request lists or deletes."""
Options = dict[str, str]


def options_of(endpoint: str) -> Options:
    return {"s3.endpoint": endpoint, "s3.region": "us-east-1", "s3.path-style-access": "true"}


@pytest.fixture(params=["moto", "versitygw"])
def bucket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Options]]:
    """An empty bucket, and options that reach it."""
    server: S3Server = request.getfixturevalue("s3_server")
    if request.param == "moto":
        yield server.bucket, options_of(server.endpoint)
        return
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", versitygw.ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", versitygw.SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    try:
        with versitygw.running(tmp_path / "objects") as server:
            yield versitygw.BUCKET, options_of(server.endpoint)
    except NotAvailableError as error:
        pytest.fail(f"this test needs versitygw {versitygw.VERSION}: {error}")


async def begun(bucket: str, options: Options, *runs: str) -> None:
    """The state of a job after these runs, with the files of many checkpoints, and files of others."""
    store = open_store(f"s3://{bucket}/x", "flights", options)
    await store.open(writable=False)
    for run in runs:
        log = JobLog(store, f"writer of {run}", SystemClock())
        await log.start_generation(parallelism=1, max_parallelism=128, run=run)
    made = [
        names.checkpoint_file(1, number, "counts", 0, "windows", "table")
        for number in range(OWN_MANY)
    ]
    for first in range(0, OWN_MANY, 50):
        await asyncio.gather(*(store.put(each, b"1") for each in made[first : first + 50]))
    await store.close()
    whole = open_store(f"s3://{bucket}", "x", options)
    await whole.open(writable=False)
    for name in KEPT:
        await whole.put(name, b"x")
    await whole.close()


async def files(bucket: str, options: Options) -> set[str]:
    store = open_store(f"s3://{bucket}", "x", options)
    await store.open(writable=False)
    found = {name async for name, _ in store.list_files("")}
    await store.close()
    return found


@pytest.mark.server
@pytest.mark.timeout(versitygw.BUILD_S_MAX + START_S_MAX)
def test_the_state_of_this_job_goes_and_nothing_else(
    bucket: tuple[str, Options], tmp_path: Path
) -> None:
    name, options = bucket
    asyncio.run(begun(name, options, "u-1-1", "u-1-2"))
    before = asyncio.run(files(name, options))
    assert len(before) > OWN_MANY + len(KEPT)
    manifest = tmp_path / "job.yaml"
    spec = {"checkpoint": {"every": "10s", "storage": f"s3://{name}/x"}, "options": options}
    manifest.write_text(json.dumps(RESOURCE | {"spec": RESOURCE["spec"] | spec}))
    arguments = ["delete-state", "--job", str(manifest), "--uid"]

    other = CliRunner().invoke(app, [*arguments, "u-2"])
    assert other.exit_code == 1
    assert "left alone" in other.output
    assert asyncio.run(files(name, options)) == before

    done = CliRunner().invoke(app, [*arguments, "u-1"])
    assert done.exit_code == 0, done.output
    assert f"deleted {len(before) - len(KEPT):,} files" in done.output
    assert asyncio.run(files(name, options)) == set(KEPT)
    again = CliRunner().invoke(app, [*arguments, "u-1"])
    assert again.exit_code == 0
    assert "no state to delete" in again.output
