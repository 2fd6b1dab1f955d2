"""How a job is cut into subtasks and executed: parallelism, limits of single steps, batch mode, Ray."""

from __future__ import annotations

from ..protocol.worker_nodes import ALLOWED, IF_ALONE, NEVER
from .types import Boolean, Choice, Duration, Integer, Option, Size, Text

PARALLELISM = Option[int](
    "parallelism.default",
    Integer(at_least=1, at_most=32768, unit="subtasks"),
    1,
    "Parallelism of operators that do not set their own.",
)
MAX_PARALLELISM = Option[int | None](
    "pipeline.max-parallelism",
    Integer(at_least=1, at_most=32768, unit="key groups"),
    None,
    "Number of key groups, fixed for the life of the job's state; unset: the next power of two of "
    "1.5 × parallelism, at least 128.",
)
CHAINING = Option[bool](
    "pipeline.operator-chaining.enabled",
    Boolean(),
    True,
    "Run operators joined by a forward edge in one subtask. A source and the event time of its splits are "
    "in one in any case.",
    ("pipeline.operator-chaining",),
)
WATERMARK_INTERVAL = Option[int](
    "pipeline.auto-watermark-interval",
    Duration(),
    200,
    "How often watermarks of live data are sent; 0: after every batch, also of data at rest. A watermark "
    "that ends a tumbling, sliding or cumulative window of a later step is sent at once.",
)
TASK_SLICE = Option[int](
    "headgate.task.slice",
    Duration(at_least_ms=1),
    50,
    "Longest stretch of user code between two looks at barriers, credits and timers; longer batches "
    "are split.",
)
PRE_AGGREGATION = Option[bool](
    "headgate.pre-aggregation.enabled",
    Boolean(),
    True,
    "Aggregate the records of windows before they are sent to other subtasks, where no result can tell. "
    "See docs/windows.md.",
)
PRE_AGGREGATION_GROUPS = Option[int](
    "headgate.pre-aggregation.groups-max",
    Integer(at_least=1, unit="partial results"),
    65_536,
    "The most partial results, one per key and part of a window, that one subtask holds before it sends "
    "them on.",
)
ASYNC_WAITING_RECORDS = Option[int](
    "headgate.async.waiting-records",
    Integer(unit="records"),
    65_536,
    "The records that a step with calls under way takes in addition, so that a barrier can pass; "
    "further records wait.",
)
ITERATION_MEMORY = Option[int](
    "headgate.iteration.memory",
    Size(),
    64 * 2**20,
    "The most memory for records that came back to the head of a loop. Further records go to disk, and "
    "input waits.",
)
MATCH_PARTIAL_MAX = Option[int](
    "headgate.match.partial-max",
    Integer(at_least=1, unit="partial matches"),
    100_000,
    "The most partial matches of a pattern for one key, and the most records that they have taken (a "
    "record counts once for each beginning after which it was taken). More fails the job.",
)
DISCOVERY_INTERVAL = Option[int](
    "headgate.source.discovery-interval",
    Duration(),
    60_000,
    "How often sources whose splits can become more, such as the partitions of Kafka, look for new ones; "
    "0: never. Sources of files have `discover_every` instead.",
)
DISCOVERY_TIMEOUT = Option[int](
    "headgate.source.discovery-timeout",
    Duration(at_least_ms=1),
    60_000,
    "How long a look for new splits may take before a warning is shown. There is no second one beside it.",
)
DISCOVERED_SPLITS_MAX = Option[int](
    "headgate.source.discovered-splits-max",
    Integer(at_least=1, unit="splits"),
    100_000,
    "The most splits that a source may have for new ones to be read. If there are more, a warning is shown "
    "and the job goes on with those that it has.",
)
REPLACED_FILES_MAX = Option[int](
    "headgate.sink.replaced-files-max",
    Integer(at_least=1, at_most=100_000_000, unit="files"),
    1_000_000,
    "How many files of earlier runs one sink with `overwrite` may replace; the job log keeps their names "
    "until they are deleted. With more the run is refused.",
)
CODE_SIZE = Option[int](
    "headgate.code.size-max",
    Size(),
    512 << 20,
    "Largest size of the files in the zip file of `kubernetes.code.archive`, and of that file itself. They "
    "are unpacked into a volume of 4 GB.",
)
RUNTIME_MODE = Option[str](
    "execution.runtime-mode",
    Choice(("STREAMING", "BATCH", "AUTOMATIC")),
    "STREAMING",
    "How a job runs. `BATCH`: as a PySpark job, which needs bounded sources; `AUTOMATIC`: that if all "
    "sources are bounded.",
)
SPARK_MASTER = Option[str](
    "headgate.batch.spark-master",
    Text(),
    "local[*]",
    "Where Spark runs a job in batch mode: `local[4]`, `spark://host:port`, `k8s://address` or `yarn`. A "
    "Spark session that is active in the process is used as it is.",
)
WORKER_SLOTS = Option[int](
    "taskmanager.numberOfTaskSlots",
    Integer(at_least=1, at_most=32768, unit="slots"),
    1,
    "Slots of a worker process on Ray: each hosts one subtask of every step of its slot sharing group. "
    "Fewer processes need less memory and send each other less; the steps of one process share its "
    "interpreter. In process one worker has all slots; on Kubernetes `workers.slots` sets them.",
)
SLOT_RESOURCE = Option[str | None](
    "headgate.ray.slot-resource",
    Text(),
    None,
    "Name of a custom resource of Ray. A worker on an existing Ray cluster takes one of it for each of its "
    "slots, so that a node hosts as many slots as it was started with; workers wait until there is enough. "
    "Unset: workers take no resources of Ray.",
)
WORKERS_ON_HEAD = Option[str](
    "headgate.ray.workers-on-head",
    Choice((NEVER, IF_ALONE, ALLOWED)),
    IF_ALONE,
    "Whether workers may run on the head node of an existing Ray cluster: never, only as long as it is the "
    "cluster's only node, or like on any other node. With `never` they wait for other nodes.",
)
