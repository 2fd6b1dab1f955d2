"""Files that coordinators leave in the run directory."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import subprocess
from pathlib import Path

import msgspec
import pytest

import headgate as hg
from headgate.connectors import blackhole, numbers
from headgate.errors import CorruptError, StateError, StorageError, UsageError
from headgate.runtime.control import registry
from headgate.runtime.listening import UnixSocket

LIVES = registry.JobRecord(
    name="lives",
    addresses=["tcp:127.0.0.1:1"],
    token="secret",
    pid=os.getpid(),
    started_ms=1,
    cluster="local",
)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a record."""
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path))
    registry.register(LIVES)
    (path,) = tmp_path.glob("job-*.json")
    return path


def test_every_bit_of_a_record_counts(record: Path) -> None:
    data = record.read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        record.write_bytes(flipped)
        with pytest.raises(StateError, match=re.escape(f"`{record}`")) as damaged:
            registry.find("lives")
        assert damaged.value.fix
        found, (unread,) = registry.records()
        assert (found, str(record) in unread.message) == ([], True)
        registry.forget(LIVES)
        assert record.exists()


def test_a_record_of_an_older_version_is_read(record: Path) -> None:
    plain = msgspec.json.encode(LIVES)
    assert plain.startswith(b'{"name":"lives"')
    record.write_bytes(plain)
    assert registry.records() == ([LIVES], [])
    record.write_bytes(plain.replace(b'"lives"', b'"lived"'))
    with pytest.raises(CorruptError, match="it is that of another job, lived"):
        registry.find("lives")


def test_a_record_that_cannot_be_read_is_named(record: Path) -> None:
    record.unlink()
    record.mkdir()
    with pytest.raises(StorageError, match=re.escape(f"path=`{record}`")):
        registry.find("lives")
    assert len(registry.records()[1]) == 1


def test_a_changed_address_of_a_coordinator_that_lives_does_not_make_it_dead(record: Path) -> None:
    changed = msgspec.structs.replace(LIVES, addresses=["unix:/run/changed.rest"])
    assert not registry.is_alive(changed)
    Path(registry.rest_socket_path("lives", LIVES.pid, LIVES.token)).touch()
    assert registry.is_alive(changed)


def test_a_run_replaces_a_damaged_record_and_says_so(
    record: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record.write_bytes(record.read_bytes()[:-9])
    job = hg.Job("lives", parallelism=1)
    job.read(numbers(10), name="numbers").write(blackhole(), name="out")
    assert job.run().status == "FINISHED"
    assert str(record) in caplog.text
    assert not record.exists()


def test_the_sockets_of_a_killed_coordinator_go_when_its_job_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = registry.rest_socket_path("again", dead.pid, "secret")
    for path in (left, registry.socket_path("again", dead.pid, "secret")):
        Path(path).touch()
    registry.register(
        registry.JobRecord(
            name="again",
            addresses=[f"unix:{left}", "tcp:127.0.0.1:1"],
            token="secret",
            pid=dead.pid,
            started_ms=0,
            cluster="local",
        )
    )
    job = hg.Job("again", parallelism=1)
    job.read(numbers(10), name="numbers").write(blackhole(), name="out")
    assert job.run().status == "FINISHED"
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_closes_late_leaves_the_path_to_a_newer_one(tmp_path: Path) -> None:
    asyncio.run(closes_late(tmp_path))


async def closes_late(tmp_path: Path) -> None:
    path = tmp_path / "job.rest"

    async def listen(path: str) -> asyncio.AbstractServer:
        return await asyncio.start_unix_server(lambda _reader, writer: writer.close(), path)

    older, newer = UnixSocket(str(path)), UnixSocket(str(path))
    servers = [await older.open(listen), await newer.open(listen)]
    older.remove()
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    reader, writer = await asyncio.open_unix_connection(str(path))
    assert await reader.read() == b""
    writer.close()
    newer.remove()
    newer.remove()
    assert not path.exists()
    for server in servers:
        server.close()


def test_a_start_that_is_refused_leaves_the_job_that_runs_reachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path / "run"))

    def endless() -> hg.Job:
        job = hg.Job("twice", parallelism=1)
        job.checkpoint(every="1h", storage=tmp_path / "checkpoints")
        job.read(numbers(rate=100), name="numbers").write(blackhole(), name="out")
        return job

    with endless().start() as handle:
        with pytest.raises(UsageError, match="the job runs already"):
            endless().start()
        found = hg.attach("twice")
        assert found.run_id == handle.run_id
        assert found.status()["name"] == "twice"
