"""State of jobs as Spark DataFrames, read and written; see docs/spark_state.md.

    import headgate.spark

    headgate.spark.register(spark)
    spark.read.format("headgate").option("operator", "totals").option("state", "total").load(path)

Importing this module does not load pyspark; using it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from .savepoint_writer import SavepointWriter

__all__ = ["SavepointWriter", "register"]

_PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: Any) -> None:
    """Make `format("headgate")` known to a session, and let Spark hand filters down to it.

    Args:
        spark: a SparkSession, of Spark 4.0 or newer. Its executors must be able to import headgate.

    Raises:
        UsageError: pyspark is not installed.
    """
    _check_installed()
    from .data_source import HeadgateDataSource, pushes_filters

    if pushes_filters():
        spark.conf.set(_PUSH_DOWN, "true")
    spark.dataSource.register(HeadgateDataSource)


def _check_installed() -> None:
    try:
        import pyspark.sql.datasource  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyspark":
            raise
        raise UsageError(
            "state as DataFrames needs pyspark 4.0 or newer",
            fix="run: pip install 'headgate[spark]'",
        ) from error


if not TYPE_CHECKING:  # a type checker would take it to mean that any name exists

    def __getattr__(name: str) -> Any:
        if name != "SavepointWriter":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _check_installed()
        from .savepoint_writer import SavepointWriter

        return SavepointWriter
