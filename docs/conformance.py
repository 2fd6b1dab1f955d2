"""Prints the tables of docs/conformance.md: the checks of the kit, and which connector passes which.

`python docs/conformance.py`. A test compares the page with this.
"""

from __future__ import annotations

from typing import Any

from headgate.testing.connectors import Check, SourceCase, sink_checks, source_checks
from headgate.tests.spark.test_conformance import SparkSourceCase
from headgate.tests.support.connector_cases import FILES_AND_MEMORY
from headgate.tests.support.http_cases import HTTP
from headgate.tests.support.kafka_cases import KAFKA
from headgate.tests.support.kinesis_cases import KINESIS
from headgate.tests.support.made_cases import MADE
from headgate.tests.support.mysql_cases import MYSQL
from headgate.tests.support.postgres_cases import POSTGRES
from headgate.tests.support.pulsar_cases import PULSAR
from headgate.tests.support.queue_cases import QUEUES
from headgate.tests.support.rabbitmq_cases import RABBITMQ
from headgate.tests.support.ray_datasets import RayDatasetCase
from headgate.tests.support.s3_cases import S3
from headgate.tests.support.sqs_cases import SQS
from headgate.tests.support.stream_cases import NATS, REDIS
from headgate.tests.support.table_cases import TABLES
from headgate.tests.support.unrepeated_cases import UNREPEATED

CASES: dict[str, type[Any]] = {
    **FILES_AND_MEMORY,
    **MADE,
    **HTTP,
    **UNREPEATED,
    **S3,
    "spark_source": SparkSourceCase,
    "ray_dataset_source": RayDatasetCase,
    **KAFKA,
    **POSTGRES,
    **MYSQL,
    **NATS,
    **REDIS,
    **RABBITMQ,
    **KINESIS,
    **PULSAR,
    **QUEUES,
    **SQS,
    **TABLES,
}

WITHOUT_CASE: dict[str, str] = {
    "blackhole": "It drops all records, so there is nothing to look at.",
    "stop_after_idle": "The coordinator of a job decides on the end, and the reader is that of the source "
    "which it is given. [Tests of jobs](../tests/connectors/test_stop_after_idle.py) try the end.",
}
"""Public sources and sinks to which the kit cannot be applied, each with the reason."""


def table(kind: str, checks: list[Check[Any]], cases: dict[str, type[Any]]) -> str:
    """Return the checks as rows and the connectors as columns."""
    lines = [f"### {kind}", ""]
    lines.append("| check | promise | " + " | ".join(f"`{name}`" for name in cases) + " |")
    lines.append("|" + "---|" * (len(cases) + 2))
    for check in checks:
        marks = ["passes" if check.applies_to(case) else "" for case in cases.values()]
        lines.append(f"| `{check.name}` | {check.promise} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def tables() -> str:
    """Return the tables of sources, of sinks, and of what has no column in them."""
    sources = {name: case for name, case in CASES.items() if issubclass(case, SourceCase)}
    sinks = {name: case for name, case in CASES.items() if name not in sources}
    without = ["### Without checks", "", "| connector | reason |", "|---|---|"]
    without += [f"| `{name}` | {reason} |" for name, reason in WITHOUT_CASE.items()]
    return "\n\n".join(
        [
            table("Sources", list(source_checks()), sources),
            table("Sinks", list(sink_checks()), sinks),
            "\n".join(without),
        ]
    )


if __name__ == "__main__":
    print(tables())
