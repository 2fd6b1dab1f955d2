"""Every metric of the engine: scope, name, type, unit, meaning. A test holds a running job against it.

Names and meanings are Flink's (features.md section 4). `python -m headgate.runtime.observe.catalogue`
prints docs/metrics.md.
"""

from __future__ import annotations

from dataclasses import dataclass

JOB = "jobmanager_job"
TASK = "taskmanager_job_task"
OPERATOR = "taskmanager_job_task_operator"
LABELS = {
    JOB: ("job_name",),
    TASK: ("job_name", "worker", "task_name", "subtask_index"),
    OPERATOR: ("job_name", "worker", "task_name", "operator_name", "subtask_index"),
}
_TITLES = {
    JOB: "Job: from the coordinator",
    TASK: "Task: one subtask, from its worker",
    OPERATOR: "Operator: one operator in one subtask, from its worker",
}
COUNTER, GAUGE = "counter", "gauge"
STATUSES = ("INITIALIZING", "RECONCILING", "RUNNING", "FAILING", "RESTARTING")
"""Job states that have a gauge each."""


@dataclass(frozen=True, slots=True)
class MetricDoc:
    """One metric. `name` is without the scope and without the `_total` of a counter."""

    scope: str
    name: str
    type: str
    unit: str
    meaning: str

    @property
    def sample(self) -> str:
        """The name as it is scraped."""
        total = "_total" if self.type == COUNTER else ""
        return f"headgate_{self.scope}_{self.name}{total}"


def _job(name: str, unit: str, meaning: str) -> MetricDoc:
    return MetricDoc(JOB, name, GAUGE, unit, meaning)


def _task(name: str, unit: str, meaning: str, type: str = GAUGE) -> MetricDoc:
    return MetricDoc(TASK, name, type, unit, meaning)


def _operator(name: str, unit: str, meaning: str, type: str = GAUGE) -> MetricDoc:
    return MetricDoc(OPERATOR, name, type, unit, meaning)


CATALOGUE: tuple[MetricDoc, ...] = (
    _job("lastCheckpointDuration", "ms", "From trigger to log entry; -1: none yet."),
    _job(
        "lastCheckpointSize",
        "bytes",
        "What the last completed checkpoint wrote; -1: none yet under this coordinator.",
    ),
    _job(
        "lastCheckpointFullSize",
        "bytes",
        "State in the last completed checkpoint, with what it shares with older ones; -1: none yet.",
    ),
    _job(
        "lastCheckpointProcessedData",
        "bytes",
        "Records processed while its barriers were aligned; -1: none yet under this coordinator.",
    ),
    _job(
        "lastCheckpointPersistedData",
        "bytes",
        "Records on their way that became part of it; -1: none yet under this coordinator.",
    ),
    _job("lastCompletedCheckpointId", "", "-1: none yet."),
    _job("lastCheckpointCompletedTimestamp", "ms since 1970", "-1: none yet."),
    _job(
        "lastCheckpointRestoreTimestamp",
        "ms since 1970",
        "When a checkpoint was last restored by this coordinator; -1: never.",
    ),
    _job("numberOfInProgressCheckpoints", "checkpoints", "Triggered, and not yet in the log."),
    _job("numberOfCompletedCheckpoints", "checkpoints", "Since this coordinator began."),
    _job(
        "numberOfFailedCheckpoints",
        "checkpoints",
        "Since this coordinator began; those given up because the job failed or ended do not count.",
    ),
    _job("numRestarts", "restarts", "Since this coordinator began."),
    _job(
        "lastTakeoverOrphanedTime",
        "ms",
        "How long workers had no coordinator before this one adopted them; -1: it has adopted none.",
    ),
    _job(
        "lastRestartDuration",
        "ms",
        "From the last failure until all subtasks ran again; -1: none yet under this coordinator. The same "
        "holds for the other metrics of the last restart.",
    ),
    _job(
        "lastRestartSilence",
        "ms",
        "How long nothing had been heard of the worker that was lost; noticing took at most that. -1: "
        "no worker was lost.",
    ),
    _job("lastRestartCancelDuration", "ms", "Until everything of the failed attempt had stopped."),
    _job("lastRestartDelay", "ms", "The pause that the restart strategy wanted."),
    _job(
        "lastRestartDeployDuration",
        "ms",
        "From the end of the pause until all subtasks were ready; it includes the next three.",
    ),
    _job("lastRestartWorkersDuration", "ms", "Until all workers were there."),
    _job(
        "lastRestartDownloadStateDuration",
        "ms",
        "Until the slowest subtask had read its state, from its machine or from storage.",
    ),
    _job(
        "lastRestartInitializeStateDuration",
        "ms",
        "What the operators of the slowest subtask needed to take over what was read.",
    ),
    _job("lastRestartLocalStateSize", "bytes", "Read from copies on the workers' machines."),
    _job("lastRestartRemoteStateSize", "bytes", "Read from the checkpoint's storage."),
    _job(
        "numRestartedTasks",
        "tasks",
        "How many tasks all restarts together have begun again, since this coordinator began.",
    ),
    _job(
        "numLateMessages",
        "messages",
        "What workers said about attempts that were over; it had no effect.",
    ),
    _job("uptime", "ms", "How long the job has been RUNNING without a break; 0: it is not."),
    _job("downtime", "ms", "Since the failure that the job recovers from; 0: it does not."),
    *(
        _job(f"{status.lower()}State", "", f"1 while the job is {status}, else 0.")
        for status in STATUSES
    ),
    *(
        _job(f"{status.lower()}Time", "ms", f"How long the job has been {status}; 0: it is not.")
        for status in STATUSES
    ),
    *(
        _job(
            f"{status.lower()}TimeTotal",
            "ms",
            f"How long the job has been {status} in all, since this coordinator began.",
        )
        for status in STATUSES
    ),
    _job("numRegisteredTaskManagers", "workers", "Workers that are connected."),
    _job("taskSlotsTotal", "slots", "Slots of the connected workers."),
    _task("numRecordsIn", "records", "Taken by the first operator.", COUNTER),
    _task("numRecordsOut", "records", "Sent to other tasks.", COUNTER),
    _task("numBytesOut", "bytes", "Sent to other tasks, per receiver.", COUNTER),
    _task("numBuffersOut", "buffers", "Sent to other tasks, per receiver.", COUNTER),
    _task("busyTimeMsPerSecond", "ms/s", "Share of the last second spent at work."),
    _task("idleTimeMsPerSecond", "ms/s", "Share of the last second spent waiting for input."),
    _task(
        "backPressuredTimeMsPerSecond",
        "ms/s",
        "Share of the last second spent waiting for room downstream.",
    ),
    _task(
        "fullTimeMsPerSecond",
        "ms/s",
        "Share of the last second in which it took no records, since it had as many asynchronous calls "
        "under way as it may. With the three above it adds up to 1000.",
    ),
    _task("isBackPressured", "", "1 if it waits for room downstream at this moment, else 0."),
    _task(
        "isProcessingBacklog",
        "",
        "1 while it reads the history of a hybrid source, else 0; sources only.",
    ),
    _task(
        "currentCallTimeMs",
        "ms",
        "How long it has been in one call, of a step or of ours; 0 between calls.",
    ),
    _task("inputQueueLength", "buffers", "Buffers that wait in the input gate."),
    _task("inPoolUsage", "", "The same as a share of all the gate may hold, 0 to 1."),
    _task(
        "debloatedBufferSize",
        "bytes",
        "What the senders were told to put into one buffer at most. Only with debloating.",
    ),
    _task(
        "estimatedTimeToConsumeBuffersMs",
        "ms",
        "How long the buffers in front of it would last if all were full. Only with debloating.",
    ),
    _task("outputQueueLength", "buffers", "Buffers that wait for credit from receivers."),
    _task("currentInputWatermark", "ms since 1970", "The watermark that came in last."),
    _task(
        "checkpointStartDelayNanos",
        "ns",
        "From the trigger of the last checkpoint to its first barrier here.",
    ),
    _task(
        "checkpointAlignmentTime",
        "ns",
        "From the first to the last barrier of the last checkpoint here.",
    ),
    _task("mailboxQueueSize", "mails", "Checkpoint notices and timers that wait to run."),
    _operator("numRecordsIn", "records", "Taken.", COUNTER),
    _operator("numRecordsOut", "records", "Emitted on the main output.", COUNTER),
    _operator("currentInputWatermark", "ms since 1970", "The watermark that came in last."),
    _operator("currentOutputWatermark", "ms since 1970", "The watermark that went out last."),
    _operator(
        "numLateRecordsDropped",
        "records",
        "Came behind the watermark and the allowed lateness; they go to the side output `late`. "
        "Of joins also to `late_other`. Windows, joins and patterns only.",
        COUNTER,
    ),
    _operator(
        "numDropped",
        "records, timers",
        "Let go for good: late, unreadable or failed records, and others, that no stream takes; see "
        "[what is dropped](operations.md#what-is-dropped).",
        COUNTER,
    ),
    _operator(
        "numPartialMatchesTimedOut",
        "matches",
        "Were begun and not complete within the time of their pattern; they go to the side output "
        "`timed_out`. Patterns only.",
        COUNTER,
    ),
    _operator(
        "numLeftRowsWaiting",
        "records",
        "Of the first stream, kept since others may come that they meet. Joins only.",
    ),
    _operator(
        "numRightRowsWaiting",
        "records",
        "Of the second stream, the same; of a temporal join: versions kept. Joins only.",
    ),
    _operator(
        "numFiredTimers",
        "timers",
        "Were due, and handled. Process functions, windows of records and patterns only.",
        COUNTER,
    ),
    _operator(
        "numTimersDropped",
        "timers",
        "By the machine's clock, not due when the input ended. As `numFiredTimers`.",
        COUNTER,
    ),
    _operator(
        "numRecordsInFlight",
        "records",
        "Taken, their results not sent yet; they are state. `map_async` and async micro-batches only.",
    ),
    _operator(
        "numRecordsTimedOut",
        "records",
        "Their calls did not end in time, and the job went on. `map_async` only.",
        COUNTER,
    ),
    _operator(
        "numCallsRetried",
        "calls",
        "Made again, since the one before failed or had an unwanted result. `map_async` and async "
        "micro-batches only.",
        COUNTER,
    ),
    _operator(
        "numFailedRecords",
        "records",
        "Their function raised, and the job went on, as `on_error` says; they go to the side output "
        "`failed`, or are dropped.",
        COUNTER,
    ),
    _operator("numFailedRecordsDropped", "records", "Those of them that were dropped.", COUNTER),
    _operator(
        "numFeedbackRecordsWaiting",
        "records",
        "Came back in a loop and wait to be sent in again. Loops only.",
    ),
    _operator(
        "numFeedbackBytesSpilled",
        "bytes",
        "Of such records, written to local disk since there was no room in memory. Loops only.",
        COUNTER,
    ),
    _operator(
        "numFeedbackRecordsDropped",
        "records",
        "Came back when the loop had ended. Loops only.",
        COUNTER,
    ),
    _operator(
        "numRecordsInErrors", "records", "Could not be read, and were not. Sources only.", COUNTER
    ),
    _operator("numRecordsSend", "records", "Handed to the outside. Sinks only.", COUNTER),
    _operator(
        "currentEmitEventTimeLag",
        "ms",
        "How far the newest record of the last batch was behind the clock when it was emitted. "
        "`event_time` only.",
    ),
    _operator(
        "watermarkLag", "ms", "How far the watermark is behind the clock. `event_time` only."
    ),
    _operator(
        "watermarkHeldTime",
        "ms",
        "How long ago the watermark rose last: of the subtask with the greatest value ask which split "
        "holds it back, `headgate list --json` says so. `event_time` only.",
    ),
    _operator(
        "numRecordsBehindClock",
        "records",
        "Came behind a watermark that followed the clock, and would have been in time without "
        "`close_after`. `event_time` only.",
        COUNTER,
    ),
)
_MEANINGS = {(metric.scope, metric.name): metric.meaning for metric in CATALOGUE}


def documentation(scope: str, name: str) -> str:
    """The help text of a metric; its name if it is one of the user's."""
    return _MEANINGS.get((scope, name), name)


_HEAD = """\
# Metrics

<!-- generated: python -m headgate.runtime.observe.catalogue > docs/metrics.md -->

With the option `metrics.port` set, every process of a job serves its metrics in Prometheus' text format
under `/metrics`. The coordinator takes the first free port from `metrics.port` on, each worker the first
free one above it; with `metrics.port` 0 all take any free port. A job that runs in one process has one
endpoint. `headgate list --json` shows all addresses under `metrics`:

```
$ headgate run ticker.yaml -D metrics.port=9249 &
$ headgate list --json | jq -r '.[].metrics[].url'
http://127.0.0.1:9249/metrics
http://127.0.0.1:9250/metrics
http://127.0.0.1:9251/metrics
```

Endpoints listen on loopback; `metrics.bind-host` changes that. They have no authentication: let only your
Prometheus reach them. A process that finds no free port says so in its log and runs without.

Where Flink has the metric, its name is Flink's with `headgate` in place of `flink`; about a third are
headgate's own. Labels differ: there is `worker`, and no `tm_id`, `host`, `task_id`, `operator_id` or
`task_attempt_num`. So a dashboard made for Flink does not work by renaming alone. Counters end in `_total`,
as Prometheus wants it, and begin at 0 with each attempt, except those of the coordinator. `NaN` means: no
value yet. Watermarks are -2^63 before the first and 2^63 - 1 after the end. Metrics that a function
registers through its operator's context appear in the operator's scope under their own names.
"""


def markdown() -> str:
    """docs/metrics.md."""
    parts = [_HEAD]
    for scope, title in _TITLES.items():
        labels = ", ".join(f"`{label}`" for label in LABELS[scope])
        parts.append(f"\n## {title}\n\nLabels: {labels}.\n")
        parts.append("\n| name | type | unit | meaning |\n|---|---|---|---|\n")
        parts.extend(
            f"| `{metric.sample}` | {metric.type} | {metric.unit} | {metric.meaning} |\n"
            for metric in CATALOGUE
            if metric.scope == scope
        )
    return "".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
