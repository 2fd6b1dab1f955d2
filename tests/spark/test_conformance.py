"""The Spark source keeps all promises of the conformance kit."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headgate.connectors import spark_source
from headgate.connectors.functions.loop_thread import in_thread
from headgate.connectors.spark.task import Task
from headgate.operators.source import Source
from headgate.testing.connectors import Check, SourceCase, source_checks
from headgate.tests.spark.test_spark_results import prepared
from headgate.tests.support.connector_cases import PASSWORD, SCHEMA, Directory, Rows

_numbers = itertools.count()


class SparkSourceCase(Rows, Directory, SourceCase):
    """The rows of JSON files, which a query has put into the storage of the job."""

    secrets = (PASSWORD,)

    def put(self, place: Path, records: Sequence[Any]) -> None:
        (place / "rows").mkdir(exist_ok=True)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (place / "rows" / f"{next(_numbers)}.json").write_text(lines)

    def source(self, place: Path) -> Source:
        self.put(place, [])
        files = str(place / "rows")

        def rows(spark: Any) -> Any:
            return spark.read.schema("id long, name string").json(files)

        conf = {"spark.hadoop.fs.s3a.secret.key": PASSWORD}
        source = spark_source(query=rows, conf=conf, schema=SCHEMA, batch_rows=1)
        made: Source = in_thread(lambda: prepared(source, str(place / "storage")))
        return made


@pytest.mark.parametrize(
    "check",
    [each for each in source_checks() if each.applies_to(SparkSourceCase)],
    ids=lambda check: check.name,
)
def test_it_keeps_the_promise(asked: list[Task], check: Check[Any]) -> None:
    asyncio.run(check.run(SparkSourceCase()))
