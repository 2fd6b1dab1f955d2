"""The optional extras of headgate's installation, and the error for a missing one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from ..errors import PlanError

_PACKAGES: Final = {
    "delta": ("deltalake",),
    "iceberg": ("pyiceberg", "pyiceberg_core", "sqlalchemy"),
    "kafka": ("confluent_kafka", "kafka"),
    "kinesis": ("aiobotocore",),
    "mqtt": ("paho",),
    "mysql": ("pymysqlreplication", "pymysql"),
    "nats": ("nats",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "postgres": ("psycopg",),
    "protobuf": ("google.protobuf",),
    "pulsar": ("pulsar",),
    "rabbitmq": ("rstream",),
    "redis": ("redis",),
    "rocksdb": ("rocksdict",),
    "s3": ("aiobotocore", "boto3"),
    "spark": ("pyspark",),
    "sqs": ("aiobotocore",),
}
"""The packages imported by each extra. Packages that only some uses need are left out."""


def missing_extra(extra: str, who: str, where: str = "") -> PlanError | None:
    """Return the error if packages of `extra` are not installed. Nothing is imported.

    Args:
        extra: one of those in pyproject.toml.
        who: the feature that needs it, as the subject of a sentence.
        where: the user's line.
    """
    missing = [name for name in _PACKAGES[extra] if not _is_there(name)]
    if not missing:
        return None
    packages = f"package {missing[0]}" if len(missing) == 1 else f"packages {' and '.join(missing)}"
    return PlanError(
        f"{who} needs the {packages}, not installed here",
        where=where,
        fix=f"run: pip install 'headgate[{extra}]', on all machines of the cluster",
    )


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def check_extra(extra: str, who: str) -> None:
    """Raise PlanError if packages of `extra` are not installed."""
    error = missing_extra(extra, who)
    if error is not None:
        raise error


def check_ray(cluster: str) -> None:
    """Raise PlanError if Ray, which is a dependency of headgate, was uninstalled; nothing is imported."""
    if find_spec("ray") is None:
        raise PlanError(
            f"a job on the cluster `{cluster}` needs the package ray, not installed here",
            fix="run: pip install 'ray>=2.50,<3', or run the job in one process: --cluster in-process",
        )
