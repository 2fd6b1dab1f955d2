"""Every metric of the engine: name, type, labels, meaning. Tests hold a running job against it."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Merge: TypeAlias = Literal["sum", "max", "min"]

JOB: Final = "job"
TASK: Final = "task"
OPERATOR: Final = "operator"
PROCESS: Final = "process"
LABELS: Final = {
    JOB: ("job_name",),
    TASK: ("job_name", "task", "subtask"),
    OPERATOR: ("job_name", "task", "operator", "subtask"),
    PROCESS: ("job_name",),
}
PREFIX: Final = "headgate_"
USER_PREFIX: Final = "user_"
"""Begins the names of metrics that are not in the catalogue: those of users and their connectors."""
STATUSES: Final = ("INITIALIZING", "RECONCILING", "RUNNING", "FAILING", "RESTARTING")
"""Job states; each is a value of the label `state`, in lower case."""
DURATIONS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds, in seconds, of histograms of checkpoints, restarts and restores."""
LATENCIES: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds, in seconds, of histograms of single calls and records."""


class MetricDoc(msgspec.Struct, frozen=True):
    """One metric.

    Attributes:
        name: without `headgate_` and without the `_total` of a counter.
        scope: JOB, TASK, OPERATOR or PROCESS; it says which labels all its series have.
        kind: counter, gauge or histogram.
        meaning: a sentence for users, also the help text of a scrape.
        labels: what it has beside those of its scope.
        absent: when there is no sample; empty: there is always one.
        merge: what one process shows of several subtasks where they have no label of their own.
        flink: Flink's names for the same figure.
        buckets: upper bounds of a histogram.
    """

    name: str
    scope: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    absent: str = ""
    merge: Merge = "sum"
    flink: tuple[str, ...] = ()
    buckets: tuple[float, ...] = DURATIONS

    @property
    def sample(self) -> str:
        """The name as it is scraped; of a histogram the part before `_bucket`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def help(self) -> str:
        """The help text of a scrape."""
        return f"{self.meaning} Absent {self.absent}." if self.absent else self.meaning


_NONE_YET: Final = "before the first completed checkpoint"
_SEEN: Final = "until one has completed under this coordinator"
_NO_EVENT_TIME: Final = "before the first watermark and after the last"


def _job(
    name: str,
    kind: Kind,
    meaning: str,
    *flink: str,
    labels: tuple[str, ...] = (),
    absent: str = "",
) -> MetricDoc:
    return MetricDoc(name, JOB, kind, meaning, labels, absent, flink=flink)


def _task(
    name: str,
    kind: Kind,
    meaning: str,
    *flink: str,
    labels: tuple[str, ...] = (),
    absent: str = "",
    merge: Merge = "sum",
) -> MetricDoc:
    return MetricDoc(f"task_{name}", TASK, kind, meaning, labels, absent, merge, flink)


def _operator(
    name: str,
    kind: Kind,
    meaning: str,
    *flink: str,
    labels: tuple[str, ...] = (),
    absent: str = "",
    merge: Merge = "sum",
) -> MetricDoc:
    return MetricDoc(name, OPERATOR, kind, meaning, labels, absent, merge, flink, LATENCIES)


JOB_METRICS: Final = (
    _job(
        "job_info",
        "gauge",
        "Always 1. It carries the labels of the job's manifest as `label_<name>`.",
        labels=("label_<name>",),
    ),
    _job(
        "job_state",
        "gauge",
        "1 for the state that the job is in, and 0 for each other one: "
        + ", ".join(f"`{status.lower()}`" for status in STATUSES)
        + ".",
        "initializingState",
        "runningState",
        "failingState",
        "restartingState",
        labels=("state",),
    ),
    _job(
        "job_state_seconds",
        "counter",
        "Time that the job has spent in each state since this coordinator began.",
        "initializingTimeTotal",
        "runningTimeTotal",
        "failingTimeTotal",
        "restartingTimeTotal",
        labels=("state",),
    ),
    _job(
        "job_state_since_timestamp_seconds",
        "gauge",
        "When the job entered the state that it is in.",
        "initializingTime",
        "runningTime",
        "failingTime",
        "restartingTime",
    ),
    _job(
        "job_uptime_seconds",
        "gauge",
        "How long the job has been running without a break; 0 while it is not running.",
        "uptime",
    ),
    _job(
        "job_downtime_seconds",
        "gauge",
        "Time since the failure that the job is recovering from; 0 while it is not recovering.",
        "downtime",
    ),
    _job("job_restarts", "counter", "Restarts since this coordinator began.", "numRestarts"),
    _job(
        "job_restarted_tasks",
        "counter",
        "Tasks that all restarts together have started again since this coordinator began.",
    ),
    _job(
        "job_failures",
        "counter",
        "Failures since this coordinator began, by the side that can correct them: `user` (the author of "
        "the job), `data` (the sender of the records), `resource` (the operator of machines, network and "
        "storage) or `system` (a defect of headgate).",
        labels=("category",),
    ),
    _job(
        "job_stale_messages",
        "counter",
        "Messages of workers about attempts that were already over. They had no effect.",
    ),
    _job("job_parallelism", "gauge", "The parallelism that the job runs at."),
    _job("job_workers", "gauge", "Workers that are connected.", "numRegisteredTaskManagers"),
    _job("job_slots", "gauge", "Slots of the connected workers.", "taskSlotsTotal"),
    _job(
        "coordinator_generation",
        "gauge",
        "Number of the coordinator that leads the job. It rises with every takeover; 0 without a job log.",
    ),
    _job(
        "coordinator_orphaned_seconds",
        "gauge",
        "How long the workers had no coordinator before this one adopted them.",
        absent="if it has adopted none",
    ),
    _job(
        "restart_duration_seconds",
        "histogram",
        "From a failure until all subtasks ran again.",
    ),
    _job(
        "restart_phase_seconds",
        "histogram",
        "The phases of restarts: `silence` (nothing was heard of a worker that was lost), `cancel` "
        "(stopping the failed attempt), `delay` (the pause of the restart strategy), `deploy` (until all "
        "subtasks were ready), and within `deploy` `workers` (until all workers were there), `download` "
        "(the slowest subtask read its state) and `initialize` (its operators took it over).",
        labels=("phase",),
    ),
    _job(
        "restore_bytes",
        "counter",
        "State that was read in deployments: `local`, from copies on the workers' machines, or `storage`, "
        "from the checkpoint's storage.",
        labels=("location",),
    ),
    _job(
        "restore_duration_seconds",
        "histogram",
        "How long the slowest subtask of a deployment needed to read its state and to take it over; "
        "deployments without state do not count.",
    ),
    _job(
        "restore_timestamp_seconds",
        "gauge",
        "When this coordinator last restored a checkpoint.",
        "lastCheckpointRestoreTimestamp",
        absent="until it has restored one",
    ),
    _job(
        "rescale_duration_seconds",
        "histogram",
        "How long rescaling kept the job from working.",
    ),
)
CHECKPOINT_METRICS: Final = (
    _job(
        "checkpoints",
        "counter",
        "Checkpoints since this coordinator began that `completed` or `failed`. Those that were given up "
        "because the job failed or ended do not count.",
        "numberOfCompletedCheckpoints",
        "numberOfFailedCheckpoints",
        labels=("outcome",),
        absent="in jobs without checkpoints, as all metrics of checkpoints",
    ),
    _job(
        "checkpoints_in_progress",
        "gauge",
        "Checkpoints that were triggered and are not in the job log yet.",
        "numberOfInProgressCheckpoints",
    ),
    _job(
        "checkpoint_duration_seconds",
        "histogram",
        "From the trigger of a checkpoint to its entry in the job log; completed checkpoints only.",
        "lastCheckpointDuration",
    ),
    _job(
        "checkpoint_part_seconds",
        "histogram",
        "The parts of a checkpoint, once for each subtask: `start_delay` (from the trigger to its first "
        "barrier), `alignment` (from its first barrier to its last), `sync` (it processed nothing) and "
        "`async` (it wrote its state beside its work).",
        "checkpointStartDelayNanos",
        "checkpointAlignmentTime",
        labels=("part",),
    ),
    _job(
        "checkpoint_last_id",
        "gauge",
        "Number of the last completed checkpoint.",
        "lastCompletedCheckpointId",
        absent=_NONE_YET,
    ),
    _job(
        "checkpoint_last_completed_timestamp_seconds",
        "gauge",
        "When the last completed checkpoint completed.",
        "lastCheckpointCompletedTimestamp",
        absent=_NONE_YET,
    ),
    _job(
        "checkpoint_size_bytes",
        "gauge",
        "Size of the last completed checkpoint: `full`, with what it shares with older ones, or `written`, "
        "what is new in it.",
        "lastCheckpointFullSize",
        "lastCheckpointSize",
        labels=("kind",),
        absent=_NONE_YET,
    ),
    _job(
        "checkpoint_processed_bytes",
        "gauge",
        "Records processed while the barriers of the last completed checkpoint were aligned.",
        "lastCheckpointProcessedData",
        absent=_SEEN,
    ),
    _job(
        "checkpoint_in_flight_bytes",
        "gauge",
        "Records on their way that became part of the last completed checkpoint.",
        "lastCheckpointPersistedData",
        absent=_SEEN,
    ),
    _job(
        "checkpoint_interval_seconds",
        "gauge",
        "The time from one checkpoint to the next that the job asks for.",
    ),
    _job(
        "checkpoint_timeout_seconds",
        "gauge",
        "The time after which a checkpoint that is not complete is given up.",
    ),
    _job(
        "state_size_bytes",
        "gauge",
        "State of each operator in the last completed checkpoint.",
        labels=("operator",),
        absent=_SEEN,
    ),
)
TASK_METRICS: Final = (
    _task("records_in", "counter", "Records that the first operator took.", "numRecordsIn"),
    _task("records_out", "counter", "Records sent to other tasks.", "numRecordsOut"),
    _task("bytes_out", "counter", "Bytes sent to other tasks.", "numBytesOut"),
    _task("buffers_out", "counter", "Buffers sent to other tasks.", "numBuffersOut"),
    _task(
        "time_seconds",
        "counter",
        "Where the time of the subtask goes: `busy`, `idle` (no input), `backpressured` (no room "
        "downstream) or `full` (as many asynchronous calls under way as allowed). The four add up to the "
        "time that has passed.",
        "busyTimeMsPerSecond",
        "idleTimeMsPerSecond",
        "backPressuredTimeMsPerSecond",
        labels=("state",),
    ),
    _task(
        "backpressured",
        "gauge",
        "1 while the subtask waits for room downstream, else 0.",
        "isBackPressured",
    ),
    _task(
        "reading_backlog",
        "gauge",
        "1 while the subtask reads the history of a hybrid source, else 0.",
        "isProcessingBacklog",
        absent="in tasks without a source",
    ),
    _task(
        "call_seconds",
        "gauge",
        "How long the subtask has been in one call of a function; 0 between calls.",
        merge="max",
    ),
    _task(
        "input_queue_buffers",
        "gauge",
        "Buffers that wait in the input gate.",
        "inputQueueLength",
        absent="in tasks with a source, as the other metrics of input",
    ),
    _task(
        "input_queue_ratio",
        "gauge",
        "The same as a share of what the gate may hold, from 0 to 1.",
        "inPoolUsage",
        absent="in tasks with a source",
        merge="max",
    ),
    _task(
        "output_queue_buffers",
        "gauge",
        "Buffers that wait for credit from receivers.",
        "outputQueueLength",
    ),
    _task(
        "debloated_buffer_bytes",
        "gauge",
        "The largest buffer that the senders may make now.",
        "debloatedBufferSize",
        absent="without debloating",
        merge="min",
    ),
    _task(
        "debloat_time_to_consume_seconds",
        "gauge",
        "How long the buffers in front of the subtask would last if all were full.",
        "estimatedTimeToConsumeBuffersMs",
        absent="without debloating",
        merge="max",
    ),
    _task(
        "watermark_timestamp_seconds",
        "gauge",
        "The watermark that came in last.",
        "currentInputWatermark",
        absent=_NO_EVENT_TIME,
        merge="min",
    ),
    _task(
        "checkpoint_start_delay_seconds",
        "gauge",
        "From the trigger of the last checkpoint to its first barrier at this subtask.",
        "checkpointStartDelayNanos",
        merge="max",
    ),
    _task(
        "checkpoint_alignment_seconds",
        "gauge",
        "From the first to the last barrier of the last checkpoint at this subtask.",
        "checkpointAlignmentTime",
        merge="max",
    ),
    _task(
        "mailbox_mails",
        "gauge",
        "Checkpoint notices and timers that wait for the subtask.",
        "mailboxQueueSize",
    ),
)
OPERATOR_METRICS: Final = (
    _operator("records_in", "counter", "Records that the operator took.", "numRecordsIn"),
    _operator("records_out", "counter", "Records sent on the main output.", "numRecordsOut"),
    _operator(
        "input_watermark_timestamp_seconds",
        "gauge",
        "The watermark that came in last.",
        "currentInputWatermark",
        absent=_NO_EVENT_TIME,
        merge="min",
    ),
    _operator(
        "output_watermark_timestamp_seconds",
        "gauge",
        "The watermark that went out last.",
        "currentOutputWatermark",
        absent=_NO_EVENT_TIME,
        merge="min",
    ),
    _operator(
        "dropped_records",
        "counter",
        "Records and timers that the operator dropped for good: late, unreadable or failed records, and "
        "others, that no stream takes; see [what is dropped](operations.md#what-is-dropped).",
    ),
    _operator(
        "late_records",
        "counter",
        "Records that came behind the watermark and the allowed lateness, also those that the side output "
        "`late` takes. Windows, joins and patterns only.",
        "numLateRecordsDropped",
    ),
    _operator(
        "failed_records",
        "counter",
        "Records whose function raised, where the job went on, as `on_error` says. They go to the side "
        "output `failed`, or are dropped.",
    ),
    _operator("failed_records_dropped", "counter", "Those of them that were dropped."),
    _operator(
        "pattern_matches_timed_out",
        "counter",
        "Partial matches that were not complete within the time of their pattern. Patterns only.",
    ),
    _operator(
        "join_rows_waiting",
        "gauge",
        "Rows of the `left` or `right` input that are kept because others may come that they meet. Joins "
        "only.",
        labels=("side",),
    ),
    _operator(
        "timers_pending",
        "gauge",
        "Timers that are set and have not fired. Process functions, windows of records and patterns only.",
    ),
    _operator(
        "timers_fired",
        "counter",
        "Timers that were due, and handled. Process functions, windows of records and patterns only.",
    ),
    _operator(
        "timers_dropped",
        "counter",
        "Timers by the machine's clock that were not due when the input ended.",
    ),
    _operator(
        "async_records_in_flight",
        "gauge",
        "Records that were taken and whose results have not been sent. They are part of the state. "
        "`map_async` and asynchronous micro-batches only. Of a `function_sink` beside its subtask: records "
        "whose calls have not succeeded.",
    ),
    _operator(
        "async_call_seconds",
        "histogram",
        "How long calls took that ended in time, all their attempts included. `map_async`, asynchronous "
        "micro-batches and a `function_sink` beside its subtask only.",
    ),
    _operator(
        "async_records_timed_out",
        "counter",
        "Records whose calls did not end in time, where the job went on. `map_async` only.",
    ),
    _operator(
        "async_calls_retried",
        "counter",
        "Calls that were made again because the one before failed or had an unwanted result.",
    ),
    _operator(
        "loop_records_waiting",
        "gauge",
        "Records that came back in a loop and wait to be sent in again. Loops only.",
    ),
    _operator(
        "loop_spilled_bytes",
        "counter",
        "Records of a loop that were written to local disk because memory had no room.",
    ),
    _operator("loop_records_dropped", "counter", "Records that came back when the loop had ended."),
    _operator(
        "emit_event_time_lag_seconds",
        "gauge",
        "How far the newest record of the last batch was behind the clock when it was emitted. "
        "`event_time` only.",
        "currentEmitEventTimeLag",
        absent="before the first record",
        merge="max",
    ),
    _operator(
        "watermark_lag_seconds",
        "gauge",
        "How far the watermark is behind the clock. `event_time` only.",
        "watermarkLag",
        absent=_NO_EVENT_TIME,
        merge="max",
    ),
    _operator(
        "watermark_held_seconds",
        "gauge",
        "How long ago the watermark last rose. `headgate list --json` says which split holds it back. "
        "`event_time` only.",
        merge="max",
    ),
    _operator(
        "records_behind_clock",
        "counter",
        "Records that came behind a watermark that followed the clock, and that would have been in time "
        "without `close_after`. `event_time` only.",
    ),
    _operator(
        "source_records",
        "counter",
        "Records that the source has read. Sources only.",
        "numRecordsIn (of a source)",
    ),
    _operator(
        "source_record_errors",
        "counter",
        "Records that could not be read. Sources only.",
        "numRecordsInErrors",
        absent="in sources that cannot have any",
    ),
    _operator(
        "source_lag_records",
        "gauge",
        "Records that are there and have not been read. Of generated rows with a rate, those that are due. "
        "Sources only.",
        "pendingRecords",
        absent="in sources that do not know",
    ),
    _operator(
        "source_split_lag_records",
        "gauge",
        "The same by split, if the subtask has no more than `metrics.split-series-max` (32) of them.",
        "records-lag of a Kafka consumer",
        labels=("split",),
        absent="in sources that do not know",
    ),
    _operator(
        "source_lag_bytes",
        "gauge",
        "Bytes of text files, or of a database's log, that have not been read. Sources only.",
        "pendingBytes",
        absent="in sources that do not know",
    ),
    _operator(
        "source_lag_seconds",
        "gauge",
        "For how long the next record has been there to be read; 0 if none is. Sources only.",
        "currentFetchEventTimeLag",
        absent="in sources that do not know",
        merge="max",
    ),
    _operator(
        "source_idle_seconds",
        "gauge",
        "How long ago the source last gave a record. Sources only.",
        "sourceIdleTime",
        merge="max",
    ),
    _operator(
        "sink_commits",
        "counter",
        "Commits of completed checkpoints that had anything to commit, without those that failed. Those of "
        "tables, which are made once for all subtasks, are counted by the coordinator, without `subtask`. "
        "Sinks only.",
    ),
    _operator(
        "sink_commit_errors",
        "counter",
        "Commits that failed. They are repeated if the target was away; otherwise the job restarts. Sinks "
        "only.",
    ),
    _operator(
        "sink_commit_seconds",
        "histogram",
        "How long commits took. Sinks only.",
    ),
    _operator(
        "sink_uncommitted_seconds",
        "gauge",
        "For how long the oldest data of the sink that has not been committed has waited since its "
        "barrier, also if that came before a restart; 0 if nothing waits. Sinks only.",
        merge="max",
    ),
    _operator(
        "sink_prepared_seconds",
        "gauge",
        "The same for the oldest transaction that is prepared: durable outside, and not visible, such as "
        "the draft of a file or a multipart upload. Systems with a limit for transactions count this "
        "time. Sinks only.",
        merge="max",
    ),
    _operator(
        "sink_pending_transactions",
        "gauge",
        "Transactions that are prepared and not committed; of files, one per file. Sinks only.",
    ),
    _operator(
        "sink_discarded_transactions",
        "counter",
        "Transactions of attempts before this one that no checkpoint needs, and that were discarded at "
        "its start. Sinks only.",
    ),
    _operator(
        "latency_seconds",
        "histogram",
        "From the moment at which a source sent a latency marker until it came to this sink, by source: "
        "the time that records spend in queues. Sinks only.",
        "latency",
        labels=("source",),
        absent="unless `metrics.latency.interval` is set",
    ),
    _operator(
        "sink_records",
        "counter",
        "Records handed to the outside. Sinks only.",
        "numRecordsSend",
    ),
)
PROCESS_METRICS: Final = (
    MetricDoc("process_cpu_seconds", PROCESS, "counter", "Processor time of this process."),
    MetricDoc("process_resident_memory_bytes", PROCESS, "gauge", "Memory of this process in RAM."),
    MetricDoc("process_virtual_memory_bytes", PROCESS, "gauge", "Virtual memory of this process."),
    MetricDoc(
        "process_start_time_seconds", PROCESS, "gauge", "When this process began, since 1970."
    ),
    MetricDoc("process_open_fds", PROCESS, "gauge", "Open file descriptors of this process."),
    MetricDoc("process_max_fds", PROCESS, "gauge", "How many it may open."),
    MetricDoc(
        "process_memory_limit_bytes",
        PROCESS,
        "gauge",
        "The memory limit of the container that this process runs in.",
        absent="without such a limit",
    ),
)
STORAGE_METRICS: Final = (
    MetricDoc(
        "storage_requests",
        PROCESS,
        "counter",
        "Requests by operation: `read`, `write`, `create` (write an object unless there is one), `list` or "
        "`delete`, and by outcome: `ok`, `throttled` (the store asked for fewer requests) or `failed`. "
        "Each try counts.",
        ("operation", "outcome"),
        "in jobs without checkpoints, as all metrics of storage",
    ),
    MetricDoc(
        "storage_retries",
        PROCESS,
        "counter",
        "Requests that were made again, because the one before was throttled or failed in passing. "
        "Directories have none.",
        ("operation",),
    ),
    MetricDoc(
        "storage_request_seconds",
        PROCESS,
        "histogram",
        "How long requests took until their answer or their error, without pauses in between. A large "
        "file is written in several requests.",
        ("operation",),
        buckets=LATENCIES,
    ),
    MetricDoc("storage_read_bytes", PROCESS, "counter", "Bytes that were read from storage."),
    MetricDoc("storage_written_bytes", PROCESS, "counter", "Bytes that were written to storage."),
)
CATALOGUE: Final = (
    *JOB_METRICS,
    *CHECKPOINT_METRICS,
    *STORAGE_METRICS,
    *TASK_METRICS,
    *OPERATOR_METRICS,
    *PROCESS_METRICS,
)
BY_NAME: Final = {metric.name: metric for metric in CATALOGUE}
