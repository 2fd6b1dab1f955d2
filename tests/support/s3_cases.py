"""The connectors of files on S3 as cases of the conformance kit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headgate.connectors import files_sink, files_source
from headgate.connectors.files.locations import s3_client
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.operators.source import Source
from headgate.testing.connectors import Case, Feature, Server, SinkCase, SourceCase
from headgate.testing.servers.versitygw import BUCKET, S3Gateway
from headgate.tests.support.connector_cases import NOWHERE, SCHEMA, Proxied, Rows

_numbers = itertools.count()


class S3Prefix(Proxied):
    """A prefix of its own for each check, in a bucket of a server that is killed now and then."""

    def __init__(self, gateway: S3Gateway) -> None:
        self.gateway = gateway
        self.server: Server | None = gateway
        self.port = gateway.port

    def reaching(self, port: int) -> dict[str, str]:
        """The storage options for a server at this port."""
        return {
            "s3.endpoint": f"http://127.0.0.1:{port}",
            "s3.region": "us-east-1",
            "s3.path-style-access": "true",
            "s3.attempts.maximum": "2",
        }

    @property
    def client(self) -> Any:
        """A client that does not connect through the proxy."""
        return s3_client(self.reaching(self.gateway.port))

    @contextmanager
    def place(self) -> Iterator[str]:
        yield f"case-{next(_numbers)}"

    def objects(self, place: str) -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{place}/")
        return [each["Key"] for each in found.get("Contents", ())]

    def files(self, place: str, bucket: str = BUCKET, port: int | None = None) -> dict[str, Any]:
        return {
            "path": f"s3://{bucket}/{place}",
            "storage_options": self.reaching(self.port if port is None else port),
        }


class S3Source(Rows, S3Prefix, SourceCase):
    """JSON lines in objects, each `put` one of its own."""

    features = frozenset(
        {
            *(Feature.BAD_RECORDS, Feature.SERVER, Feature.CUTS),
            *(Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def put(self, place: str, records: Sequence[Any]) -> None:
        if records:
            lines = "".join(json.dumps(record) + "\n" for record in records)
            self.put_lines(place, lines)

    def put_lines(self, place: str, lines: str) -> None:
        key = f"{place}/{next(_numbers):06}.json"
        self.client.put_object(Bucket=BUCKET, Key=key, Body=lines.encode())

    def put_bad(self, place: str) -> None:
        self.put_lines(place, "{no JSON}\n")

    def source(self, place: str, **options: Any) -> Source:
        if not self.objects(place):
            self.put_lines(place, "")
        given = {"batch_rows": 1, "split_bytes": "100b", "schema": SCHEMA}
        return files_source(format="json", **(given | self.files(place) | options))

    def tolerant(self, place: str, on_bad_record: str) -> Source:
        return self.source(place, on_bad_record=on_bad_record)

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        return {
            "no such prefix": (self.source(place, path=f"s3://{BUCKET}/no-such"), "no-such"),
            "no such bucket": (self.source(place, path="s3://no-bucket/a"), "no-bucket"),
            "no server": (self.source(place, **self.files(place, port=1)), place),
        }


class S3Sink(Rows, S3Prefix, SinkCase):
    """JSON lines in multipart uploads, which a commit completes."""

    features = frozenset(
        {
            *(Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE, Feature.PENDING, Feature.SERVER),
            *(Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return files_sink(format="json", guarantee=guarantee, **self.files(place))

    def visible(self, place: str) -> list[Any]:
        client = self.client
        bodies = [client.get_object(Bucket=BUCKET, Key=key)["Body"] for key in self.objects(place)]
        return [json.loads(line) for body in bodies for line in body.read().splitlines()]

    def pending(self, place: str) -> Sequence[Any]:
        found = self.client.list_multipart_uploads(Bucket=BUCKET, Prefix=f"{place}/")
        return [each["Key"] for each in found.get("Uploads", ())]

    def mistakes(self, place: str) -> Mapping[str, tuple[Sink, str]]:
        def wrong(**given: Any) -> Sink:
            return files_sink(format="json", guarantee="exactly_once", **given)

        return {
            "no such bucket": (wrong(**self.files(place, bucket="no-bucket")), "no-bucket"),
            "no server": (wrong(**self.files(place, port=1)), NOWHERE),
        }


S3: dict[str, type[Case]] = {"json_source (S3)": S3Source, "json_sink (S3)": S3Sink}
