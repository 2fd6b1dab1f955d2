"""The options of batch execution: a bounded job as a PySpark job."""

from __future__ import annotations

from typing import Any

from .option_types import Choice, Option, Text

RUNTIME_MODE = Option[str](
    "execution.runtime-mode",
    Choice(("STREAMING", "BATCH", "AUTOMATIC")),
    "STREAMING",
    "",
    "How a job runs. `BATCH`: as a PySpark job, which needs bounded sources; `AUTOMATIC`: that if all "
    "sources are bounded.",
)
SPARK_MASTER = Option[str](
    "headgate.batch.spark-master",
    Text(),
    "local[*]",
    "",
    "Where Spark runs a job in batch mode: `local[4]`, `spark://host:port`, `k8s://address` or `yarn`. A "
    "Spark session that is active in the process is used as it is.",
)

BATCH_OPTIONS: tuple[Option[Any], ...] = (RUNTIME_MODE, SPARK_MASTER)
