"""`http_sink` and a service that has trouble, refuses records, and takes requests twice."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import Crash, from_list, http_sink
from headgate.connectors.http.client import HttpClient, HttpSettings, retry_after_s
from headgate.errors import HeadgateError, JobError, PlanError, StorageError, UsageError
from headgate.operators.clock import SystemClock
from headgate.operators.elements import ColumnBatch
from headgate.operators.sink import Sink, SinkRun, SinkWriter
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import CheckMetrics, make_context
from headgate.testing.servers.authority import Authority
from headgate.tests.support.http_stub import Asked, Given, HttpStub, TakenRecords, taking

SCHEMA = pa.schema([("id", pa.int64())])
Service = tuple[HttpStub, TakenRecords]


@pytest.fixture
def service() -> Iterator[Service]:
    with taking() as found:
        yield found


def rows(*ids: int) -> ColumnBatch:
    return ColumnBatch(pa.RecordBatch.from_pylist([{"id": n} for n in ids], schema=SCHEMA))


def opened(sink: Sink, **context: Any) -> SinkWriter:
    sink.bind(SCHEMA)
    writer = sink.writer()
    writer.open(make_context(**context))
    writer.prepare()
    return writer


def written(sink: Sink, batch: ColumnBatch, **context: Any) -> None:
    """Write a batch, and end the epoch."""
    writer = opened(sink, **context)
    try:
        writer.write(batch)
        pre_commit = writer.roll(1)
        assert pre_commit is not None
        pre_commit()
    finally:
        writer.close()


def failing(times: int, given: Given) -> Callable[[Asked], Given | None]:
    """Return the trouble of a service that gives this answer a number of times."""
    left = [times]

    def trouble(asked: Asked) -> Given | None:
        left[0] -= 1
        return given if left[0] >= 0 else None

    return trouble


@pytest.mark.parametrize(
    ("body", "bodies"),
    [
        ("array", ['[{"id":1},{"id":2}]', '[{"id":3}]']),
        ("lines", ['{"id":1}\n{"id":2}\n', '{"id":3}\n']),
        ("object", ['{"id":1}', '{"id":2}', '{"id":3}']),
    ],
)
def test_bodies(service: Service, body: Any, bodies: list[str]) -> None:
    stub, taken = service
    size = None if body == "object" else 2
    sink = http_sink(f"{stub.url}/in?a=b", body=body, rows=size, max_in_flight=1, method="PUT")
    written(sink, rows(1, 2, 3))
    assert [asked.body.decode() for asked in stub.asked] == bodies
    assert {(asked.method, asked.path) for asked in stub.asked} == {("PUT", "/in?a=b")}
    assert taken.records == [{"id": 1}, {"id": 2}, {"id": 3}]


def test_a_repeated_request_has_the_same_key_and_another_one_has_another(service: Service) -> None:
    stub, taken = service
    taken.trouble = failing(2, (503, {}, b"busy"))
    metrics = CheckMetrics()
    sink = http_sink(stub.url, rows=1, max_in_flight=1, longest_pause="1ms")
    written(sink, rows(1, 2), metrics=metrics)
    keys = [asked.headers["idempotency-key"] for asked in stub.asked]
    assert len(keys) == 4
    assert len(set(keys[:3])) == 1
    assert keys[3] != keys[0]
    assert metrics.counts["async_calls_retried"] == 2
    written(sink, rows(1), attempt=2)
    written(sink, rows(1), subtask_index=1, parallelism=2)
    assert len({asked.headers["idempotency-key"] for asked in stub.asked}) == 4


def test_a_service_that_stays_away_fails_the_checkpoint_with_the_reason(service: Service) -> None:
    stub, taken = service
    taken.trouble = lambda asked: (503, {}, b"busy,\n try   later")
    sink = http_sink(f"{stub.url}/in?token=s3cr3t", retries=2, longest_pause="1ms")
    with pytest.raises(StorageError, match=r"tries=`3`: status 503: busy, try later") as failed:
        written(sink, rows(1))
    assert len(stub.asked) == 3
    assert "s3cr3t" not in str(failed.value)
    stub.kill()
    with pytest.raises(StorageError, match="tries=`3`: ClientConnectorError"):
        written(sink, rows(1))
    with pytest.raises(UsageError, match="cannot be reached"):
        sink.check_output(SinkRun("job", "sink", {}, None, print))


def test_an_answer_that_takes_too_long_is_asked_for_again(service: Service) -> None:
    stub, taken = service
    go = threading.Event()

    def slow(asked: Asked) -> Given | None:
        if len(stub.asked) == 1:
            go.wait(60)
        return None

    taken.trouble = slow
    written(http_sink(stub.url, timeout="500ms", longest_pause="1ms", retries=1000), rows(1))
    go.set()
    assert taken.records == [{"id": 1}]


def test_retry_after_and_jitter() -> None:
    now_ms = 1_700_000_000_000
    assert retry_after_s("7", now_ms) == 7
    assert retry_after_s("Tue, 14 Nov 2023 22:13:30 GMT", now_ms) == 10
    assert retry_after_s("Tue, 14 Nov 2023 22:13:00 GMT", now_ms) == 0
    assert [retry_after_s(text, now_ms) for text in (None, "", "soon", "-1", "1e9")] == [0.0] * 5
    assert retry_after_s("9" * 40, now_ms) == 300
    settings = HttpSettings("http://host/", {}, None, 1, 1, 30)
    clients = [HttpClient(settings, SystemClock(), 1, lambda: None, str(n)) for n in range(20)]
    for tries, most in ((0, 0.5), (1, 1), (5, 16), (6, 30), (1000, 30)):
        pauses = [client.pause_s(tries, 0) for client in clients]
        assert all(most / 2 <= pause <= most for pause in pauses)
        assert len(set(pauses)) > 10
    asked = [client.pause_s(0, 100) for client in clients]
    assert all(100 < pause < 101 for pause in asked)
    assert len(set(asked)) > 10


def test_a_pause_is_as_long_as_the_service_wants(service: Service) -> None:
    stub, taken = service
    times: list[float] = []
    clock = SystemClock()

    def trouble(asked: Asked) -> Given | None:
        times.append(clock.monotonic())
        return (429, {"Retry-After": "1"}, b"") if len(times) == 1 else None

    taken.trouble = trouble
    written(http_sink(stub.url, longest_pause="1ms"), rows(1))
    assert times[1] - times[0] >= 1


def refusing(*bad: int) -> Callable[[Asked], Given | None]:
    def trouble(asked: Asked) -> Given | None:
        found = [record["id"] for record in json.loads(asked.body) if record["id"] in bad]
        return (422, {}, f"bad: {found}".encode()) if found else None

    return trouble


def test_refused_records_are_put_aside_and_their_neighbours_are_not(
    service: Service, tmp_path: Path
) -> None:
    stub, taken = service
    taken.trouble = refusing(3, 6)
    sink = http_sink(
        f"{stub.url}/in?token=s3cr3t",
        rows=8,
        on_refused="dead_letters",
        dead_letters=tmp_path / "refused",
    )
    metrics = CheckMetrics()
    for _ in range(2):  # the same attempt again writes the same files
        written(sink, rows(*range(8)), metrics=metrics)
    assert sorted(record["id"] for record in taken.records) == [0, 1, 2, 4, 5, 7]
    files = sorted((tmp_path / "refused").iterdir())
    letters = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [letter["record"] for letter in letters] == [{"id": 3}, {"id": 6}]
    assert letters[0] == {
        "sink": "sink",
        "url": f"{stub.url}/in",
        "status": 422,
        "reason": "status 422: bad: [3]",
        "record": {"id": 3},
    }
    assert metrics.counts["failed_records"] == 4


def test_refused_records_are_dropped_and_counted(service: Service) -> None:
    stub, taken = service
    taken.trouble = refusing(0)
    metrics = CheckMetrics()
    written(http_sink(stub.url, on_refused="drop"), rows(0, 1), metrics=metrics)
    assert taken.records == [{"id": 1}]
    assert metrics.counts["failed_records_dropped"] == 1


def test_a_refusal_fails_the_job_by_default(service: Service) -> None:
    stub, taken = service
    taken.trouble = refusing(0)
    with pytest.raises(JobError, match=r"records=`2`: status 422: bad: \[0\]") as failed:
        written(http_sink(stub.url), rows(0, 1))
    assert "dead_letters" in failed.value.fix
    assert len(stub.asked) == 1


def test_a_service_that_is_still_at_the_first_try_is_asked_again(service: Service) -> None:
    """Services with keys of idempotence answer 409 to a repeat while the first request is in progress."""
    stub, taken = service
    answers = iter([(503, {}, b"gone"), (409, {}, b"in progress"), (409, {}, b"in progress")])
    taken.trouble = lambda asked: next(answers, None)
    written(http_sink(stub.url, longest_pause="1ms"), rows(1))
    assert taken.records == [{"id": 1}]
    assert len({asked.headers["idempotency-key"] for asked in stub.asked}) == 1


@pytest.mark.parametrize(("statuses", "key"), [([409], "Idempotency-Key"), ([503, 409], None)])
def test_another_409_is_a_refusal(service: Service, statuses: list[int], key: str | None) -> None:
    """The first request, and requests without a key, are behind no other."""
    stub, taken = service
    left = iter(statuses)
    taken.trouble = lambda asked: (next(left), {}, b"no")
    with pytest.raises(JobError, match="status 409"):
        written(http_sink(stub.url, longest_pause="1ms", key_header=key), rows(1))


@pytest.mark.parametrize("status", [401, 403, 404, 405, 302])
def test_a_refused_sender_is_not_a_refused_record(service: Service, status: int) -> None:
    stub, taken = service
    taken.trouble = lambda asked: (status, {"Location": "http://127.0.0.1:1/"}, b"no")
    with pytest.raises(JobError, match=f"status {status}"):
        written(http_sink(stub.url, on_refused="drop"), rows(0, 1))
    assert len(stub.asked) == 1


def test_a_request_that_is_too_large_is_divided(service: Service) -> None:
    stub, taken = service
    taken.trouble = lambda asked: (413, {}, b"") if len(json.loads(asked.body)) > 2 else None
    written(http_sink(stub.url), rows(*range(7)))
    assert [record["id"] for record in taken.records] == list(range(7))


def test_secrets_of_headers_are_read_on_workers_and_not_shown(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, taken = service
    taken.token = "Bearer s3cr3t"
    sink = http_sink(stub.url, headers={"Authorization": "env:HTTP_TOKEN"})
    with pytest.raises(UsageError, match="HTTP_TOKEN"):
        opened(sink)
    monkeypatch.setenv("HTTP_TOKEN", "Bearer s3cr3t")
    written(sink, rows(1))
    monkeypatch.setenv("HTTP_TOKEN", "Bearer wrong-one")
    with pytest.raises(JobError, match=r"not you: \*\*\*") as failed:
        written(sink, rows(2))
    assert "wrong-one" not in str(failed.value)
    monkeypatch.setenv("HTTP_TOKEN", "a\nb")
    with pytest.raises(UsageError, match="cannot be sent") as refused:
        opened(sink)
    assert "a\nb" not in str(refused.value)


def test_a_header_that_the_service_repeats_is_not_shown(service: Service) -> None:
    stub, taken = service
    taken.trouble = lambda asked: (403, {}, b"wrong key: " + asked.headers["x-api-key"].encode())
    with pytest.raises(JobError, match=r"wrong key: \*\*\*") as failed:
        written(http_sink(stub.url, headers={"X-Api-Key": "k3y-0f-0urs"}), rows(1))
    assert "k3y-0f-0urs" not in str(failed.value)


def test_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    with taking(authority.server_context()) as (stub, taken):
        written(http_sink(stub.url, ca=str(authority.file)), rows(1))
        assert taken.records == [{"id": 1}]
        with pytest.raises(JobError, match="does not prove who it is"):
            written(http_sink(stub.url), rows(2))
        with pytest.raises(UsageError, match="certificates cannot be read"):
            written(http_sink(stub.url, ca=str(tmp_path / "none")), rows(2))


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: posts}}
spec:
  checkpoint: {{every: 1s, storage: {folder}/state}}
  sources:
    numbers: {{generator: {{fields: {{id: {{kind: sequence}}}}, rows: 100}}}}
  sinks:
    service:
      from: numbers
      http:
        url: "{url}/in"
        headers: {{X-From: headgate}}
        body: lines
        rows: 30
        within: 2s
        maxInFlight: 2
        timeout: 10s
        retries: 3
        longestPause: 1s
        onRefused: dead_letters
        deadLetters: {folder}/refused
      guarantee: {guarantee}
"""


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_a_manifest(service: Service, tmp_path: Path, guarantee: str) -> None:
    stub, taken = service
    job = load_job(MANIFEST.format(url=stub.url, folder=tmp_path, guarantee=guarantee))
    assert "http(http://127.0.0.1" in job.explain()
    assert job.run().status == "FINISHED"
    assert sorted(record["id"] for record in taken.records) == list(range(100))
    assert {asked.headers["x-from"] for asked in stub.asked} == {"headgate"}


def test_exactly_once_through_failures_of_the_job_and_of_the_service(
    service: Service, tmp_path: Path
) -> None:
    stub, taken = service
    lost = [0]

    def trouble(asked: Asked) -> Given | None:
        lost[0] += 1
        if lost[0] % 3 == 0:
            taken.trouble = lambda asked: None
            taken(asked)  # it is done, and the answer is lost
            taken.trouble = trouble
            return 502, {}, b""
        return None

    taken.trouble = trouble
    items: list[Any] = [{"id": n} for n in range(100)]
    items[50:50] = [Crash(attempts=2)]
    job = hg.Job("posts")
    job.restart(5, "0s")
    job.checkpoint(every="10ms", storage=str(tmp_path / "state"))
    sink = http_sink(stub.url, guarantee="exactly_once", rows=7, longest_pause="1ms")
    job.read(from_list(items, schema=SCHEMA, batch_rows=1), name="in").write(sink, name="out")
    assert job.run().status == "FINISHED"
    assert Counter(record["id"] for record in taken.records) == Counter(range(100))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "ftp://host/"}, "not an address of HTTP"),
        ({"url": "http://host:99999/"}, "not an address of HTTP"),
        ({"url": "http://ann:s3cr3t@host/"}, "has credentials in it"),
        ({"headers": {"a b": "c"}}, "not the name of a header"),
        ({"headers": {"a": "s3cr3t\r\nb: c"}}, "cannot be sent"),
        ({"headers": {"idempotency-key": "c"}}, "sets this header itself"),
        ({"body": "object", "rows": 2}, "one record"),
        ({"body": "xml"}, "no such body"),
        ({"method": "GET"}, "no such method"),
        ({"on_refused": "dead_letters"}, "belong together"),
        ({"dead_letters": "refused"}, "belong together"),
        ({"guarantee": "exactly_once", "key_header": None}, "without a key of idempotence"),
        ({"retries": -1}, "retries"),
        ({"timeout": "0s"}, "timeout"),
        ({"buffer": 0}, "buffer"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        http_sink(**{"url": "http://host/", **arguments})
    assert "s3cr3t" not in str(refused.value)


def test_streams_of_objects_and_types_without_json_are_refused() -> None:
    sink = http_sink("http://host/")
    with pytest.raises(PlanError, match="made of columns"):
        sink.bind(None)
    with pytest.raises(HeadgateError):
        sink.bind(pa.schema([("m", pa.map_(pa.int64(), pa.int64()))]))
