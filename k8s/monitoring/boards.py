"""The content of the five dashboards."""

from __future__ import annotations

from typing import Final

from .grafana import (
    AUTOSCALER,
    JOB_NAME,
    NAMESPACE,
    OPERATOR,
    TASK_NAME,
    Board,
    Panel,
    PanelType,
    Query,
)


def _quantiles(metric: str, by: str = "", matchers: str = "$J") -> tuple[Query, ...]:
    """Return the median and the slowest value of a histogram."""
    labels = f"{by}, le" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        Query(
            f"histogram_quantile({q}, sum by ({labels}) "
            f"(rate({metric}_bucket{{{matchers}}}[$__rate_interval])))",
            f"p{round(q * 100)}{legend}",
        )
        for q in (0.5, 0.99)
    )


FLEET: Final = Board(
    "headgate-fleet",
    "headgate / fleet",
    "All jobs: which run, which restart, which fall behind.",
    (NAMESPACE,),
    (
        Panel(
            "Jobs by state",
            "stat",
            "none",
            "Jobs that have a coordinator, by state. Look at those that are not running.",
            (Query("sum by (state) (headgate_job_state{$F})", "{{state}}"),),
        ),
        Panel(
            "Jobs by phase of their StreamJob",
            "stat",
            "none",
            "What the Kubernetes operator says. `Failed` needs somebody: see `kubectl describe streamjob`.",
            (Query("sum by (phase) (headgate_job_phase{$F} == 1)", "{{phase}}"),),
            OPERATOR,
        ),
        Panel(
            "Age of the last checkpoint",
            "table",
            "s",
            "How much work a failure would repeat. It should stay near the interval between checkpoints.",
            (
                Query(
                    "time() - max by (namespace, job_name) "
                    "(headgate_checkpoint_last_completed_timestamp_seconds{$F})"
                ),
            ),
        ),
        Panel(
            "Restarts in 24 hours",
            "table",
            "short",
            "A job that restarts often has a cause: `headgate history JOB` lists the failures.",
            (
                Query(
                    "sum by (namespace, job_name) (increase(headgate_job_restarts_total{$F}[24h]))"
                ),
            ),
        ),
        Panel(
            "Records read",
            "timeseries",
            "rps",
            "Throughput of all sources of each job. A line at 0 with lag is a job that stands.",
            (
                Query(
                    "sum by (namespace, job_name) "
                    "(rate(headgate_source_records_total{$F}[$__rate_interval]))"
                ),
            ),
        ),
        Panel(
            "Records behind",
            "timeseries",
            "short",
            "Records that are there and not read, of sources that know. Growing: raise the parallelism.",
            (Query("sum by (namespace, job_name) (headgate_source_lag_records{$F})"),),
        ),
        Panel(
            "State over time",
            "state-timeline",
            "none",
            "When each job was in which state. Stripes are a restart loop.",
            (
                Query(
                    "max by (namespace, job_name, state) (headgate_job_state{$F}) == 1",
                    "{{job_name}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Processor time",
            "timeseries",
            "none",
            "Cores that the processes of each job use. Compare with what they were given.",
            (
                Query(
                    "sum by (namespace, job_name) "
                    "(rate(headgate_process_cpu_seconds_total{$F}[$__rate_interval]))"
                ),
            ),
        ),
    ),
)
JOB: Final = Board(
    "headgate-job",
    "headgate / job",
    "One job: throughput, backpressure, event time, errors.",
    (NAMESPACE, JOB_NAME, TASK_NAME),
    (
        Panel(
            "Running for",
            "stat",
            "s",
            "Time since the job last began to run without a break; 0 while it does not run.",
            (Query("max(headgate_job_uptime_seconds{$J})", "uptime"),),
        ),
        Panel(
            "Restarts, parallelism, workers",
            "stat",
            "short",
            "Fewer workers than the job needs: look for pods that are pending.",
            (
                Query("sum(headgate_job_restarts_total{$J})", "restarts"),
                Query("max(headgate_job_parallelism{$J})", "parallelism"),
                Query("max(headgate_job_workers{$J})", "workers"),
            ),
        ),
        Panel(
            "Records in and out",
            "timeseries",
            "rps",
            "Throughput by operator. The first operator whose rate drops is where records get stuck.",
            (
                Query(
                    "sum by (operator) (rate(headgate_records_in_total{$T}[$__rate_interval]))",
                    "in {{operator}}",
                ),
                Query(
                    "sum by (operator) (rate(headgate_records_out_total{$T}[$__rate_interval]))",
                    "out {{operator}}",
                ),
            ),
        ),
        Panel(
            "Bytes sent",
            "timeseries",
            "Bps",
            "What tasks send to other tasks. Many bytes per record: select fewer columns "
            "before the shuffle.",
            (
                Query(
                    "sum by (task) (rate(headgate_task_bytes_out_total{$T}[$__rate_interval]))",
                    "{{task}}",
                ),
            ),
        ),
        Panel(
            "Where the time goes",
            "timeseries",
            "percentunit",
            "Share of time by task. The busy task behind backpressured ones is the bottleneck: give it "
            "more subtasks or less work.",
            (
                Query(
                    "avg by (task, state) (rate(headgate_task_time_seconds_total{$T}[$__rate_interval]))",
                    "{{task}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Busy share of each subtask",
            "timeseries",
            "percentunit",
            "Subtasks of a task that differ much have skewed keys; `headgate list --json` "
            "names the key group.",
            (
                Query(
                    "max by (task, subtask) "
                    '(rate(headgate_task_time_seconds_total{$T,state="busy"}[$__rate_interval]))',
                    "{{task}} {{subtask}}",
                ),
            ),
        ),
        Panel(
            "Skew",
            "timeseries",
            "none",
            "Records of the hottest subtask over the mean. Above 2 more parallelism helps little: look for "
            "a better key.",
            (
                Query(
                    "max by (task) (rate(headgate_task_records_in_total{$T}[$__rate_interval])) / "
                    "(avg by (task) (rate(headgate_task_records_in_total{$T}[$__rate_interval])) > 0)",
                    "{{task}}",
                ),
            ),
        ),
        Panel(
            "Input queues",
            "timeseries",
            "percentunit",
            "How full the input of each task is. Full in front of one task only: that task "
            "is the bottleneck.",
            (Query("max by (task) (headgate_task_input_queue_ratio{$T})", "{{task}}"),),
        ),
        Panel(
            "Watermark behind the clock",
            "timeseries",
            "s",
            "How late results of event time are. Growing while records come: a split or "
            "subtask holds it back.",
            (
                Query(
                    "time() - min by (task) (headgate_task_watermark_timestamp_seconds{$T})",
                    "{{task}}",
                ),
            ),
        ),
        Panel(
            "Watermark held for",
            "timeseries",
            "s",
            "How long the watermark has not risen. `headgate list --json` says which split holds it.",
            (Query("max by (operator) (headgate_watermark_held_seconds{$T})", "{{operator}}"),),
        ),
        Panel(
            "Late records",
            "timeseries",
            "rps",
            "Records behind the watermark and the allowed lateness. Many: raise `max_out_of_order`.",
            (
                Query(
                    "sum by (operator) (rate(headgate_late_records_total{$T}[$__rate_interval]))",
                    "{{operator}}",
                ),
            ),
        ),
        Panel(
            "Dropped and failed records",
            "timeseries",
            "rps",
            "Records that are in no result. `headgate list` says why; most kinds can be "
            "kept in a side output.",
            (
                Query(
                    "sum by (operator) (rate(headgate_dropped_records_total{$T}[$__rate_interval]))",
                    "dropped {{operator}}",
                ),
                Query(
                    "sum by (operator) (rate(headgate_failed_records_total{$T}[$__rate_interval]))",
                    "failed {{operator}}",
                ),
            ),
        ),
        Panel(
            "Latency from source to sink",
            "timeseries",
            "s",
            "Time in queues, from latency markers; set `metrics.latency.interval` to have them.",
            _quantiles("headgate_latency_seconds", "operator", "$T"),
        ),
        Panel(
            "Asynchronous calls",
            "timeseries",
            "s",
            "How long calls of `map_async` take. Slow calls with a full operator: raise `max_in_flight`.",
            _quantiles("headgate_async_call_seconds", "operator", "$T"),
        ),
        Panel(
            "Time in one call",
            "timeseries",
            "s",
            "The longest call that is under way. Seconds are a function that hangs: "
            "`headgate list` shows where.",
            (Query("max by (task) (headgate_task_call_seconds{$T})", "{{task}}"),),
        ),
        Panel(
            "Failures by who can do something",
            "timeseries",
            "short",
            "`user`: the job's code; `data`: records; `resource`: machines and storage; "
            "`system`: headgate.",
            (
                Query(
                    "sum by (category) (increase(headgate_job_failures_total{$J}[$__rate_interval]))",
                    "{{category}}",
                ),
            ),
        ),
        Panel(
            "Memory of each process",
            "timeseries",
            "bytes",
            "Compare with the limit: a process above it is killed. Larger state: use RocksDB.",
            (
                Query(
                    "max by (instance) (headgate_process_resident_memory_bytes{$J})", "{{instance}}"
                ),
            ),
        ),
        Panel(
            "Messages in mailboxes",
            "timeseries",
            "short",
            "Checkpoint notices and timers that wait. Many: one call of a function takes too long.",
            (Query("sum by (task) (headgate_task_mailbox_mails{$T})", "{{task}}"),),
        ),
    ),
)
CHECKPOINTS: Final = Board(
    "headgate-checkpoints",
    "headgate / checkpoints and state",
    "One job: whether it could be restored, and how fast.",
    (NAMESPACE, JOB_NAME),
    (
        Panel(
            "Since the last checkpoint",
            "stat",
            "s",
            "How much work a failure would repeat. Compare with the interval.",
            (
                Query(
                    "time() - max(headgate_checkpoint_last_completed_timestamp_seconds{$J})", "age"
                ),
                Query("max(headgate_checkpoint_interval_seconds{$J})", "interval"),
            ),
        ),
        Panel(
            "Checkpoints per minute",
            "timeseries",
            "cpm",
            "Failed ones: `headgate checkpoints JOB` says which subtask and which phase.",
            (
                Query(
                    "60 * sum by (outcome) (rate(headgate_checkpoints_total{$J}[$__rate_interval]))",
                    "{{outcome}}",
                ),
            ),
        ),
        Panel(
            "Duration",
            "timeseries",
            "s",
            "From the trigger to the entry in the job log. Near the timeout checkpoints begin to fail.",
            _quantiles("headgate_checkpoint_duration_seconds"),
        ),
        Panel(
            "Where the time goes",
            "timeseries",
            "s",
            "Mean of each part. Start delay and alignment are backpressure: try unaligned checkpoints. "
            "Async is the storage or the size of the state.",
            (
                Query(
                    "sum by (part) (rate(headgate_checkpoint_part_seconds_sum{$J}[$__rate_interval])) / "
                    "(sum by (part) (rate(headgate_checkpoint_part_seconds_count{$J}[$__rate_interval])) "
                    "> 0)",
                    "{{part}}",
                ),
            ),
        ),
        Panel(
            "Size",
            "timeseries",
            "bytes",
            "All state, and what the last checkpoint wrote. `written` near `full`: try incremental ones.",
            (Query("max by (kind) (headgate_checkpoint_size_bytes{$J})", "{{kind}}"),),
        ),
        Panel(
            "State by operator",
            "timeseries",
            "bytes",
            "The operator that grows without end wants a time to live or a window.",
            (Query("max by (operator) (headgate_state_size_bytes{$J})", "{{operator}}"),),
        ),
        Panel(
            "Records that barriers met",
            "timeseries",
            "bytes",
            "Processed while barriers were aligned, and stored because barriers overtook them.",
            (
                Query("max(headgate_checkpoint_processed_bytes{$J})", "processed"),
                Query("max(headgate_checkpoint_in_flight_bytes{$J})", "in flight"),
            ),
        ),
        Panel(
            "Restart: phases",
            "timeseries",
            "s",
            "Mean time of each phase. `workers`: machines are missing; `download`: state is far away.",
            (
                Query(
                    "sum by (phase) (headgate_restart_phase_seconds_sum{$J}) / "
                    "(sum by (phase) (headgate_restart_phase_seconds_count{$J}) > 0)",
                    "{{phase}}",
                ),
            ),
        ),
        Panel(
            "Restart and restore: mean",
            "stat",
            "s",
            "From a failure until all runs again, and of it reading and opening state.",
            (
                Query(
                    "sum(headgate_restart_duration_seconds_sum{$J}) / "
                    "(sum(headgate_restart_duration_seconds_count{$J}) > 0)",
                    "restart",
                ),
                Query(
                    "sum(headgate_restore_duration_seconds_sum{$J}) / "
                    "(sum(headgate_restore_duration_seconds_count{$J}) > 0)",
                    "restore",
                ),
            ),
        ),
        Panel(
            "State read in restores",
            "timeseries",
            "bytes",
            "From copies on the workers' machines or from storage. Only storage: turn on local recovery.",
            (Query("sum by (location) (headgate_restore_bytes_total{$J})", "{{location}}"),),
        ),
        Panel(
            "Number of the coordinator",
            "stat",
            "none",
            "It rises with every takeover. Rising often: the head's pod is killed, see its events.",
            (Query("max(headgate_coordinator_generation{$J})", "generation"),),
        ),
        Panel(
            "Alignment by task",
            "timeseries",
            "s",
            "The last checkpoint: the task with the longest alignment has inputs of different speed.",
            (Query("max by (task) (headgate_task_checkpoint_alignment_seconds{$J})", "{{task}}"),),
        ),
        Panel(
            "Requests to storage",
            "timeseries",
            "reqps",
            "All processes together, by operation. Stores limit requests per prefix and ask money for "
            "them: fewer come of longer intervals between checkpoints.",
            (
                Query(
                    "sum by (operation) (rate(headgate_storage_requests_total{$J}[$__rate_interval]))",
                    "{{operation}}",
                ),
            ),
        ),
        Panel(
            "Requests to storage that fail",
            "timeseries",
            "reqps",
            "`throttled`: the store wants fewer requests. Single ones are made again; many make "
            "checkpoints slow, and then fail.",
            (
                Query(
                    "sum by (outcome) "
                    '(rate(headgate_storage_requests_total{$J,outcome!="ok"}[$__rate_interval]))',
                    "{{outcome}}",
                ),
                Query(
                    "sum(rate(headgate_storage_retries_total{$J}[$__rate_interval]))", "made again"
                ),
            ),
        ),
        Panel(
            "Duration of requests to storage",
            "timeseries",
            "s",
            "Rising without more bytes: the store or the network is slow. `create` is the job log, which "
            "each checkpoint waits for.",
            _quantiles("headgate_storage_request_seconds", "operation"),
        ),
        Panel(
            "Bytes to and from storage",
            "timeseries",
            "Bps",
            "Written by checkpoints, read by restores. Near what the network can do, checkpoints get slow.",
            (
                Query(
                    "sum(rate(headgate_storage_written_bytes_total{$J}[$__rate_interval]))",
                    "written",
                ),
                Query("sum(rate(headgate_storage_read_bytes_total{$J}[$__rate_interval]))", "read"),
            ),
        ),
    ),
)
CONNECTORS: Final = Board(
    "headgate-connectors",
    "headgate / sources and sinks",
    "One job: how far behind it reads, and whether it commits.",
    (NAMESPACE, JOB_NAME),
    (
        Panel(
            "Records behind, by split",
            "timeseries",
            "short",
            "One split far behind the others: its producer or its key is hot.",
            (
                Query(
                    "max by (operator, split) (headgate_source_split_lag_records{$J})",
                    "{{operator}} {{split}}",
                ),
            ),
        ),
        Panel(
            "Behind in seconds",
            "timeseries",
            "s",
            "For how long the next record has waited. It is what users of the results notice.",
            (Query("max by (operator) (headgate_source_lag_seconds{$J})", "{{operator}}"),),
        ),
        Panel(
            "Time to catch up",
            "timeseries",
            "s",
            "At the present rate, if nothing more came. Longer than you can wait: raise the parallelism.",
            (
                Query(
                    "sum by (operator) (headgate_source_lag_records{$J}) / "
                    "(sum by (operator) (rate(headgate_source_records_total{$J}[$__rate_interval])) > 0)",
                    "{{operator}}",
                ),
            ),
        ),
        Panel(
            "Text that is left",
            "timeseries",
            "bytes",
            "Bytes of CSV and JSON files that have not been read.",
            (Query("sum by (operator) (headgate_source_lag_bytes{$J})", "{{operator}}"),),
        ),
        Panel(
            "Source silent for",
            "timeseries",
            "s",
            "Time since the last record. Silence with a lag is a source that hangs.",
            (Query("max by (operator) (headgate_source_idle_seconds{$J})", "{{operator}}"),),
        ),
        Panel(
            "Records that could not be read",
            "timeseries",
            "rps",
            "They fail the job, are dropped, or go to `rejected`, as `on_bad_record` says.",
            (
                Query(
                    "sum by (operator) (rate(headgate_source_record_errors_total{$J}[$__rate_interval]))",
                    "{{operator}}",
                ),
            ),
        ),
        Panel(
            "Records written",
            "timeseries",
            "rps",
            "Handed to each sink. Sinks that commit show them outside with the next checkpoint.",
            (
                Query(
                    "sum by (operator) (rate(headgate_sink_records_total{$J}[$__rate_interval]))",
                    "{{operator}}",
                ),
            ),
        ),
        Panel(
            "Commits",
            "timeseries",
            "cps",
            "Commits of sinks that have something to commit. None: no checkpoint completes.",
            (
                Query(
                    "sum by (operator) (rate(headgate_sink_commits_total{$J}[$__rate_interval]))",
                    "{{operator}}",
                ),
            ),
        ),
        Panel(
            "Oldest data that is not committed",
            "timeseries",
            "s",
            "How old results are when others see them. It should stay below two intervals "
            "between checkpoints. `prepared` stays below: nothing can be made durable outside.",
            (
                Query("max by (operator) (headgate_sink_uncommitted_seconds{$J})", "{{operator}}"),
                Query(
                    "max by (operator) (headgate_sink_prepared_seconds{$J})",
                    "prepared {{operator}}",
                ),
            ),
        ),
        Panel(
            "Transactions that wait for their commit",
            "timeseries",
            "short",
            "Drafts of files, for example. More and more: no checkpoint completes, or commits are slow.",
            (Query("sum by (operator) (headgate_sink_pending_transactions{$J})", "{{operator}}"),),
        ),
        Panel(
            "Duration of commits",
            "timeseries",
            "s",
            "Longer than the interval between checkpoints: results come later and later.",
            _quantiles("headgate_sink_commit_seconds", "operator"),
        ),
        Panel(
            "Transactions of dead attempts",
            "timeseries",
            "short",
            "Discarded when the sink began again: no checkpoint had them, and their records are "
            "written again.",
            (
                Query(
                    "max by (operator) (headgate_sink_discarded_transactions_total{$J})",
                    "{{operator}}",
                ),
            ),
        ),
    ),
)
_OPERATOR_PANELS: Final[tuple[tuple[str, PanelType, str, str, str, str, str], ...]] = (
    (
        "Leader",
        "stat",
        "none",
        "One pod should lead. None: nothing is reconciled, and running jobs go on.",
        "max by (pod) (headgate_operator_leader)",
        "{{pod}}",
        OPERATOR,
    ),
    (
        "Reconciliations",
        "timeseries",
        "ops",
        "By outcome. Errors: see the operator's log.",
        "sum by (kind, outcome) (rate(headgate_operator_reconciles_total[$__rate_interval]))",
        "{{kind}} {{outcome}}",
        OPERATOR,
    ),
    (
        "Duration of a reconciliation",
        "timeseries",
        "s",
        "Seconds are an API server that answers slowly.",
        "histogram_quantile(0.99, sum by (kind, le) "
        "(rate(headgate_operator_reconcile_seconds_bucket[$__rate_interval])))",
        "p99 {{kind}}",
        OPERATOR,
    ),
    (
        "Oldest item of the queue",
        "timeseries",
        "s",
        "Growing: the operator does not keep up with changes.",
        "max by (queue) (headgate_operator_queue_oldest_seconds)",
        "{{queue}}",
        OPERATOR,
    ),
    (
        "Since the last event of a watch",
        "timeseries",
        "s",
        "Minutes are a watch that is broken; the operator restarts itself then.",
        "time() - max by (resource) (headgate_operator_watch_last_event_timestamp_seconds)",
        "{{resource}}",
        OPERATOR,
    ),
    (
        "Phases that last too long",
        "table",
        "s",
        "For how long. `kubectl describe streamjob NAME` says what the job waits for.",
        "max by (namespace, job_name) (time() - headgate_job_phase_deadline_timestamp_seconds) > 0",
        "{{job_name}}",
        f"{OPERATOR}, and only for a job that is late",
    ),
    (
        "Upgrades, rollbacks and other transitions",
        "timeseries",
        "short",
        "Each is a new run of a job, or the end of one. `status.rejected` of a StreamJob says why it was "
        "rolled back.",
        "sum by (transition) (increase(headgate_job_transitions_total[$__rate_interval]))",
        "{{transition}}",
        OPERATOR,
    ),
    (
        "Snapshots that ended",
        "timeseries",
        "short",
        "By outcome. Failed ones: `kubectl describe streamsnapshot NAME` has the error.",
        "sum by (outcome) (increase(headgate_job_snapshots_total[$__rate_interval]))",
        "{{outcome}}",
        OPERATOR,
    ),
    (
        "Recommended parallelism",
        "timeseries",
        "none",
        "What the autoscaler would choose.",
        "max by (job_name) (headgate_autoscaler_recommended_parallelism)",
        "{{job_name}}",
        AUTOSCALER,
    ),
)
OPERATOR_BOARD: Final = Board(
    "headgate-operator",
    "headgate / Kubernetes operator",
    "The operator of StreamJobs itself.",
    (),
    tuple(
        Panel(title, kind, unit, description, (Query(expression, legend),), needs)
        for title, kind, unit, description, expression, legend, needs in _OPERATOR_PANELS
    ),
)
BOARDS: Final = (FLEET, JOB, CHECKPOINTS, CONNECTORS, OPERATOR_BOARD)
