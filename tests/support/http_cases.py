"""The connectors of HTTP as cases of the conformance kit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from headgate.connectors import http_sink, http_source, sse_source
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.operators.source import Source
from headgate.testing.connectors import Case, Feature, SinkCase, SourceCase
from headgate.testing.servers.process import HeldPort
from headgate.tests.support.connector_cases import NOWHERE, SCHEMA, Proxied, Rows
from headgate.tests.support.http_stub import Asked, Given, HttpStub, TakenRecords, taking


class HttpSinkCase(Rows, Proxied, SinkCase):
    """A service that takes each request with the same key once, and is killed now and then."""

    features = frozenset(
        {
            Feature.EXACTLY_ONCE,
            Feature.AT_LEAST_ONCE,
            Feature.SERVER,
            Feature.CUTS,
            Feature.MISTAKES,
            Feature.CONNECTS,
        }
    )
    secrets = ("s3cr3t", "not-for-you")
    unseen = frozenset({"a wrong token", "a wrong token, exactly once"})

    def __init__(self) -> None:
        self._held = HeldPort()
        self.port = self._held.number

    @contextmanager
    def place(self) -> Iterator[tuple[HttpStub, TakenRecords]]:
        with taking(port=self._held.number) as (stub, taken):
            taken.token = "Bearer s3cr3t"
            self.server = stub
            yield stub, taken

    def sink(self, place: tuple[HttpStub, TakenRecords], guarantee: GuaranteeLike) -> Sink:
        return self._sink(f"http://127.0.0.1:{self.port}", "Bearer s3cr3t", guarantee)

    def _sink(self, url: str, token: str, guarantee: GuaranteeLike) -> Sink:
        return http_sink(
            f"{url}/rows?with=not-for-you",
            headers={"Authorization": token},
            rows=1,
            longest_pause="10ms",
            retries=1000,
            guarantee=guarantee,
        )

    def visible(self, place: tuple[HttpStub, TakenRecords]) -> list[Any]:
        return place[1].records

    def mistakes(self, place: tuple[HttpStub, TakenRecords]) -> Mapping[str, tuple[Sink, str]]:
        url = place[0].url
        return {
            "no service": (
                self._sink(f"http://{NOWHERE}", "Bearer s3cr3t", "at_least_once"),
                NOWHERE,
            ),
            "a wrong token": (self._sink(url, "Bearer not-for-you", "at_least_once"), "status 401"),
            "a wrong token, exactly once": (
                self._sink(url, "Bearer not-for-you", "exactly_once"),
                "status 401",
            ),
        }


class HttpSourceCase(Rows, Proxied, SourceCase):
    """A service that gives the rows behind an id, some at a time."""

    features = frozenset(
        {Feature.LIVE, Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS}
    )
    secrets = ("s3cr3t", "not-for-you")
    unseen = frozenset({"a wrong token"})

    def __init__(self) -> None:
        self._held = HeldPort()
        self.port = self._held.number
        self.server = self.stub = HttpStub(lambda asked: (404, {}, b""), port=self.port)

    @contextmanager
    def place(self) -> Iterator[list[Any]]:
        rows: list[Any] = []

        def answer(asked: Asked) -> Given:
            if asked.headers.get("authorization") != "Bearer s3cr3t":
                return 401, {}, b"not you: " + asked.headers["authorization"].encode()
            return self.given(rows, asked)

        self.stub.answer = answer
        with self.stub:
            yield rows

    def given(self, rows: list[Any], asked: Asked) -> Given:
        after = int(parse_qs(urlsplit(asked.path).query).get("after", ["-1"])[0])
        found = [row for row in rows if row["id"] > after][:5]
        return 200, {}, json.dumps({"data": {"rows": found}}).encode()

    def put(self, place: list[Any], records: Sequence[Any]) -> None:
        place.extend(records)

    def source(self, place: list[Any], **options: Any) -> Source:
        given = {
            "headers": {"Authorization": "Bearer s3cr3t"},
            "items": "data.rows",
            "position": "id",
            "batch_rows": 1,
            "every": "10ms",
            "longest_pause": "10ms",
            "retries": 1000,
            "stop": "latest",
        }
        url = options.pop("url", f"http://127.0.0.1:{self.port}")
        return http_source(f"{url}/rows?with=not-for-you", SCHEMA, **(given | options))

    def live(self, place: list[Any]) -> Source:
        return self.source(place, stop=None)

    def mistakes(self, place: list[Any]) -> Mapping[str, tuple[Source, str]]:
        wrong = {"Authorization": "Bearer not-for-you"}
        return {
            "no service": (self.source(place, url=f"http://{NOWHERE}"), NOWHERE),
            "a wrong token": (self.source(place, headers=wrong), "status 401"),
        }


class SseSourceCase(HttpSourceCase):
    """A service that gives events, and ends the stream behind three of them; 204 when there are no more."""

    ends = True

    def given(self, rows: list[Any], asked: Asked) -> Given:
        after = int(asked.headers.get("last-event-id", "-1"))
        found = [row for row in rows if row["id"] > after][:3]
        if not found and self.ends:
            return 204, {}, b""
        events = [f"id: {row['id']}\ndata: {json.dumps(row)}\n\n".encode() for row in found]
        return 200, {"Content-Type": "text/event-stream"}, events

    def source(self, place: list[Any], **options: Any) -> Source:
        given = {
            "headers": {"Authorization": "Bearer s3cr3t"},
            "batch_rows": 1,
            "longest_pause": "10ms",
            "retries": 1000,
            "bounded": True,
        }
        url = options.pop("url", f"http://127.0.0.1:{self.port}")
        self.ends = True
        return sse_source(f"{url}/rows?with=not-for-you", SCHEMA, **(given | options))

    def live(self, place: list[Any]) -> Source:
        made = self.source(place, bounded=False)
        self.ends = False
        return made


HTTP: dict[str, type[Case]] = {
    "http_source": HttpSourceCase,
    "sse_source": SseSourceCase,
    "http_sink": HttpSinkCase,
}
