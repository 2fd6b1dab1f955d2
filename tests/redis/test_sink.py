"""The sink of Redis: its chunks, what it says of lost entries, and whole jobs."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import from_list, redis_sink, redis_source
from headgate.connectors.redis.keys import Staged
from headgate.connectors.redis.writer import LostEntries
from headgate.errors import JobError, PlanError, UsageError
from headgate.operators.elements import ColumnBatch
from headgate.operators.sink import SinkRun
from headgate.runtime.manifest import load_job
from headgate.state.snapshot import CommitPermit
from headgate.testing.connectors import make_context
from headgate.testing.servers.redis import RedisServer, running
from headgate.tests.support.connector_runs import Fails

NewStream = Callable[[], str]
PERMIT = CommitPermit("job", 1, 1)


def batch_of(*numbers: int) -> ColumnBatch:
    return ColumnBatch(pa.RecordBatch.from_pylist([{"id": n} for n in numbers]))


def open_writer(stream: str, url: str, **options: Any) -> Any:
    sink = redis_sink(stream, url=url, guarantee="exactly_once", **options)
    writer: Any = sink.writer()
    writer.open(make_context())
    writer.prepare()
    return writer


def precommitted(writer: Any, *numbers: int, checkpoint: int = 1) -> list[bytes]:
    writer.write(batch_of(*numbers))
    return list(writer.roll(checkpoint)())


def ids(client: Any, stream: str) -> list[int]:
    return [int(entry[b"id"]) for _, entry in client.xrange(stream)]


def in_loop(work: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return work()

    return asyncio.run(run())


def test_a_commit_goes_on_behind_the_last_chunk_that_was_moved(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream, numbers = new_stream(), range(1_700)

    def run() -> None:
        writer = open_writer(stream, server.url)
        (committable,) = precommitted(writer, *numbers)
        staged = msgspec.msgpack.decode(committable, type=Staged)
        assert staged.chunks == 4
        writer._move_once(staged, 0)
        writer._move_once(staged, 1)
        assert ids(client, stream) == list(range(1_000))
        writer._move_once(staged, 0)  # the answer was lost, and the request is repeated
        writer.commit([committable], PERMIT)
        writer.commit([committable], PERMIT)
        writer.close()

    in_loop(run)
    assert ids(client, stream) == list(numbers)


def test_a_chunk_that_is_sent_again_is_staged_once(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream = new_stream()

    def run() -> None:
        writer = open_writer(stream, server.url)
        send = writer.send

        def twice(chunk: Any) -> None:
            send(chunk)
            send(chunk)

        writer.send = twice
        (committable,) = precommitted(writer, *range(600))
        writer.commit([committable], PERMIT)
        writer.close()

    in_loop(run)
    assert ids(client, stream) == list(range(600))


def test_a_writer_that_was_closed_gives_no_committable(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    """A closed writer deletes what no checkpoint has, so no checkpoint may get it afterwards."""
    stream = new_stream()

    def run() -> Any:
        writer = open_writer(stream, server.url)
        writer.write(batch_of(*range(500)))
        pre_commit = writer.roll(1)
        writer._send_until(1)  # as the thread for full chunks does
        assert client.keys("hg:{" + stream + "}:*")
        writer.close()
        return pre_commit

    pre_commit = in_loop(run)  # the loop ends behind the thread of `close`
    assert not client.keys("hg:{" + stream + "}:*")
    with pytest.raises(JobError, match="was closed"):
        pre_commit()


@pytest.mark.parametrize("on_lost", ["fail", "skip"])
def test_lost_entries_are_an_error_or_skipped(
    server: RedisServer, client: Any, new_stream: NewStream, on_lost: str
) -> None:
    stream = new_stream()

    def run() -> None:
        writer = open_writer(stream, server.url, on_lost=on_lost)
        (first,) = precommitted(writer, *range(700))
        (second,) = precommitted(writer, 1_000, checkpoint=2)
        client.lpop(msgspec.msgpack.decode(first, type=Staged).key)
        if on_lost == "fail":
            with pytest.raises(LostEntries, match="entries=`700`"):
                writer.commit([first], PERMIT)
        else:
            writer.commit([first, second], PERMIT)
            assert ids(client, stream) == [1_000]
            assert [key for key in client.keys(f"hg:{{{stream}}}:*") if b"marker" not in key] == []
        writer.close()

    in_loop(run)


@pytest.mark.parametrize("on_lost", ["fail", "skip"])
def test_a_server_that_has_forgotten_a_commit(
    server: RedisServer, client: Any, new_stream: NewStream, on_lost: str
) -> None:
    stream = new_stream()

    def run() -> None:
        writer = open_writer(stream, server.url, on_lost=on_lost)
        writer.commit(precommitted(writer, 1), PERMIT)
        client.delete(stream, writer._marker)
        later = precommitted(writer, 2, checkpoint=2)
        if on_lost == "fail":
            with pytest.raises(LostEntries, match="does not remember"):
                writer.commit(later, PERMIT)
        else:
            writer.commit(later, PERMIT)
            assert ids(client, stream) == [2]
        writer.close()

    in_loop(run)


def test_staged_entries_that_the_server_lost_end_the_attempt(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream = new_stream()

    def run() -> None:
        writer = open_writer(stream, server.url)
        writer.write(batch_of(*range(500)))
        writer._send_until(1)
        client.delete(writer._epoch.name)
        writer.write(batch_of(*range(500, 600)))
        prepare = writer.roll(1)
        with pytest.raises(LostEntries, match="had acknowledged"):
            prepare()
        with pytest.raises(JobError, match="had acknowledged"):
            writer.write(batch_of(1))
        writer.close()

    in_loop(run)


def test_a_refusal_of_the_server_is_told(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream = new_stream()
    client.set(stream, "text")

    def run() -> None:
        writer = open_writer(stream, server.url)
        (committable,) = precommitted(writer, 1)
        with pytest.raises(JobError, match="WRONGTYPE"):
            writer.commit([committable], PERMIT)
        client.delete(stream)
        writer.commit([committable], PERMIT)  # nothing was removed when it failed
        writer.close()

    in_loop(run)
    assert ids(client, stream) == [1]


def test_types_payloads_and_the_length_of_a_stream(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    fields, payload, short = new_stream(), new_stream(), new_stream()
    row = {"i": 1, "f": 0.1, "b": True, "raw": b"\0\xff", "s": "ä", "none": None}
    data = pa.RecordBatch.from_pylist([row])
    data = data.set_column(5, "none", pa.array([None], pa.string()))
    options: dict[str, Any] = {"url": server.url}
    for sink in (redis_sink(fields, **options), redis_sink(payload, format="json", **options)):
        as_fields = sink.settings.format.name == "fields"
        batch = data if as_fields else data.drop_columns(["raw"])
        sink.bind(batch.schema)

        def run(sink: Any = sink, batch: pa.RecordBatch = batch) -> None:
            writer = sink.writer()
            writer.open(make_context())
            writer.prepare()
            writer.write(ColumnBatch(batch))
            assert writer.roll(1)() == []
            writer.close()

        in_loop(run)
    ((_, entry),) = client.xrange(fields)
    assert entry == {
        b"i": b"1",
        b"f": b"0.1",
        b"b": b"true",
        b"raw": b"\0\xff",
        b"s": "ä".encode(),
    }
    ((_, entry),) = client.xrange(payload)
    assert list(entry) == [b"value"]
    assert b'"f":0.1' in entry[b"value"]

    def run_short() -> None:
        writer = open_writer(short, server.url, max_length=100)
        writer.commit(precommitted(writer, *range(1_000)), PERMIT)
        writer.close()

    in_loop(run_short)
    assert 100 <= client.xlen(short) <= 300
    assert ids(client, short)[-1] == 999


def test_a_record_without_a_value_is_refused(server: RedisServer, new_stream: NewStream) -> None:
    def run() -> None:
        writer = open_writer(new_stream(), server.url)
        empty = pa.RecordBatch.from_pylist([{"id": None}], schema=pa.schema([("id", pa.int64())]))
        with pytest.raises(JobError, match="needs a field"):
            writer.write(ColumnBatch(empty))
        writer.close()

    in_loop(run)


def test_wrong_arguments() -> None:
    url = "redis://host"
    with pytest.raises(UsageError, match="no stream"):
        redis_sink("", url=url)
    with pytest.raises(UsageError, match="no such format"):
        redis_sink("orders", url=url, format="csv")
    with pytest.raises(UsageError, match="slot of the stream"):
        redis_sink("or}ders", url=url, guarantee="exactly_once", cluster=True)
    with pytest.raises(PlanError, match="cannot be a field"):
        redis_sink("orders", url=url).bind(pa.schema([("x", pa.list_(pa.int64()))]))
    with pytest.raises(PlanError, match="Python objects"):
        redis_sink("orders", url=url).bind(None)


@pytest.mark.parametrize("policy", ["always", "everysec"])
def test_a_file_that_is_written_late_is_announced(
    server: RedisServer, client: Any, new_stream: NewStream, policy: str
) -> None:
    told: list[str] = []
    client.config_set("appendfsync", policy)
    try:
        sink = redis_sink(new_stream(), url=server.url)
        sink.check_output(SinkRun("job", "orders", {}, None, told.append))
    finally:
        client.config_set("appendfsync", "always")
    assert ["background" in each for each in told] == ([True] if policy == "everysec" else [])


def test_a_server_that_may_forget_is_announced(tmp_path: Path) -> None:
    arguments = ("--appendonly", "no", "--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru")
    with running(tmp_path / "server", *arguments) as own:
        told: list[str] = []
        sink = redis_sink("orders", url=own.url, guarantee="exactly_once")
        sink.check_output(SinkRun("job", "orders", {}, None, told.append))
    assert ["append-only" in told[0], "allkeys-lru" in told[1]] == [True, True]


def test_a_cluster(cluster: RedisServer) -> None:
    for stream in ("orders", "{orders}:eu"):

        def run(stream: str = stream) -> None:
            writer = open_writer(stream, cluster.url, cluster=True)
            writer.commit(precommitted(writer, *range(600)), PERMIT)
            writer.close()

        in_loop(run)
        with cluster.client() as client:
            assert ids(client, stream) == list(range(600))

    def add() -> None:
        writer: Any = redis_sink("early", url=cluster.url, cluster=True, max_length=100).writer()
        writer.open(make_context())
        writer.prepare()
        assert precommitted(writer, *range(600)) == []
        writer.close()

    in_loop(add)
    with cluster.client() as client:
        found = ids(client, "early")
        assert found == list(range(600))[-len(found) :]
        assert 100 <= len(found) <= 300


def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    from headgate.testing.servers.process import HeldPort

    tls_port = HeldPort()
    arguments = [
        *("--tls-port", str(tls_port.number), "--tls-cert-file", str(certificate)),
        *("--tls-key-file", str(key), "--tls-auth-clients", "no"),
    ]
    with running(tmp_path / "server", *arguments) as own, own.client() as client:
        client.xadd("orders", {"id": 1})
        url = f"rediss://127.0.0.1:{tls_port.number}"
        redis_source("orders", url=url, ca=str(certificate), schema={"id": "long"}).splits(1)
        with pytest.raises(JobError, match="(?i)certificate"):
            redis_source("orders", url=url, schema={"id": "long"}).splits(1)
    tls_port.release()


def test_a_job_counts_every_record_once_through_a_failure(
    server: RedisServer, client: Any, new_stream: NewStream, tmp_path: Path
) -> None:
    source, target = [new_stream(), new_stream()], new_stream()
    with client.pipeline(transaction=False) as pipeline:
        for n in range(3_000):
            pipeline.xadd(source[n % 2], {"id": n})
        pipeline.execute()
    job = hg.Job("redis-to-redis", parallelism=2)
    job.checkpoint(every="20ms", storage=str(tmp_path / "state"))
    job.read(
        redis_source(source, url=server.url, schema={"id": "long"}, stop="latest", batch_rows=50),
        name="numbers",
    ).map(Fails(tmp_path, (1_500,)), into={"id": "long"}).write(
        redis_sink(target, url=server.url, guarantee="exactly_once"), name="out"
    )
    job.run()
    assert (tmp_path / "1500").exists()
    assert sorted(ids(client, target)) == list(range(3_000))


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: numbers}}
spec:
  checkpoint: {{every: 1h, storage: {path}/state}}
  sources:
    numbers:
      redis:
        streams: [{source}]
        url: {url}
        metadata: {{id: at}}
        start: {{ids: {{{source}: 1000-1}}}}
        stop: latest
        group: dashboards
      schema: {{id: long}}
      onBadRecord: side_output
  sinks:
    out:
      from: numbers
      redis: {{stream: {target}, url: {url}, format: json, field: body}}
      guarantee: exactly_once
    rejected:
      from: numbers.rejected
      parquet: {{path: {path}/rejected}}
      guarantee: exactly_once
"""


def test_a_manifest_reads_and_writes_streams(
    server: RedisServer, client: Any, new_stream: NewStream, tmp_path: Path
) -> None:
    source, target = new_stream(), new_stream()
    for n in range(1, 4):
        client.xadd(source, {"id": n}, id=f"1000-{n}")
    client.xadd(source, {"id": "x"}, id="1000-4")
    file = tmp_path / "numbers.yaml"
    file.write_text(MANIFEST.format(source=source, target=target, url=server.url, path=tmp_path))
    load_job(file).run()
    found = [msgspec.json.decode(entry[b"body"]) for _, entry in client.xrange(target)]
    assert found == [{"id": 2, "at": "1000-2"}, {"id": 3, "at": "1000-3"}]
    ((bad,),) = [pq.read_table(file).to_pylist() for file in tmp_path.glob("rejected/*.parquet")]
    assert (bad["id"], bad["fields"]) == ("1000-4", [{"name": b"id", "value": b"x"}])
    ((group),) = client.xinfo_groups(source)
    assert (group["name"], group["last-delivered-id"]) == (b"dashboards", b"1000-4")


def test_a_list_can_be_written(
    server: RedisServer, client: Any, new_stream: NewStream, tmp_path: Path
) -> None:
    target = new_stream()
    job = hg.Job("list-to-redis")
    job.checkpoint(every="1h", storage=str(tmp_path / "state"))
    job.read(from_list([{"id": 1}], schema={"id": "long"}), name="numbers").write(
        redis_sink(target, url=server.url), name="out"
    )
    job.run()
    assert ids(client, target) == [1]


def commands_of(page: str, heading: str) -> list[str]:
    """Return the rights that a page lists behind a text, as ACL writes them."""
    behind = page[page.index(heading) :]
    listed = behind[behind.index("`+") + 1 : behind.index("`", behind.index("`+") + 1)]
    return listed.split()


def test_the_listed_rights_are_enough(
    server: RedisServer, client: Any, new_stream: NewStream, tmp_path: Path
) -> None:
    page = (Path(hg.__file__).parent / "docs" / "redis.md").read_text()
    source, target, early = new_stream(), new_stream(), new_stream()
    for n in range(3):
        client.xadd(source, {"id": n})
    rights = {
        "reads": ([*commands_of(page, "## The source"), "+xgroup"], [f"~{source}"]),
        "writes": (commands_of(page, "### Exactly once"), [f"~{target}", "~hg:*"]),
        "adds": (commands_of(page, "At least once takes"), [f"~{early}"]),
    }
    for user, (commands, keys) in rights.items():
        client.execute_command("ACL", "SETUSER", user, "reset", "on", ">secret", *keys, *commands)
    urls = {user: server.url.replace("//", f"//{user}:secret@") for user in rights}
    job = hg.Job("rights")
    job.checkpoint(every="1h", storage=str(tmp_path / "state"))
    rows = job.read(
        redis_source(source, url=urls["reads"], schema={"id": "long"}, stop="latest", group="g"),
        name="numbers",
    )
    rows.write(redis_sink(target, url=urls["writes"], guarantee="exactly_once"), name="out")
    rows.write(redis_sink(early, url=urls["adds"]), name="early")
    job.run()
    assert ids(client, target) == ids(client, early) == [0, 1, 2]
