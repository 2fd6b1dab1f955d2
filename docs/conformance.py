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
from headgate.tests.support.postgres_cases import POSTGRES
from headgate.tests.support.queue_cases import QUEUES
from headgate.tests.support.rabbitmq_cases import RABBITMQ
from headgate.tests.support.ray_datasets import RayDatasetCase
from headgate.tests.support.s3_cases import S3
from headgate.tests.support.sqs_cases import SQS
from headgate.tests.support.stream_cases import NATS, REDIS
from headgate.tests.support.table_cases import TABLES

CASES: dict[str, type[Any]] = {
    **FILES_AND_MEMORY,
    **HTTP,
    **S3,
    "spark_source": SparkSourceCase,
    "ray_dataset_source": RayDatasetCase,
    **KAFKA,
    **POSTGRES,
    **NATS,
    **REDIS,
    **RABBITMQ,
    **KINESIS,
    **QUEUES,
    **SQS,
    **TABLES,
}


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
    """Return both tables."""
    sources = {name: case for name, case in CASES.items() if issubclass(case, SourceCase)}
    sinks = {name: case for name, case in CASES.items() if name not in sources}
    return "\n\n".join(
        [
            table("Sources", list(source_checks()), sources),
            table("Sinks", list(sink_checks()), sinks),
        ]
    )


if __name__ == "__main__":
    print(tables())
