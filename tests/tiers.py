"""The tests that `make test` runs, and those that are left to `make test-rest`.

`make test` shall take at most five minutes on two cores, and find most mistakes: a contributor runs it
before each commit. A test belongs to it unless the table below says otherwise, or it starts Ray or kills
processes (marks `ray` and `chaos`). tests/README.md explains how to choose.
"""

from __future__ import annotations

from collections import Counter

FAST = "not rest and not kube"
"""The argument of `-m` that selects what `make test` runs."""
SLOW = "rest and not (ray or chaos or kube)"
"""The argument of `-m` that selects the slow tests of `make test-rest`."""

FAST_ONE_IN: dict[str, int] = {
    "aggregates": 2,
    "async_io/test_lab.py": 4,
    "batch/test_batch_golden.py": 14,
    "benchmarks": 5,
    "benchmarks/test_connectors_bench.py::test_every_connector_of_a_system_has_a_line": 0,
    "benchmarks/test_reads_bench.py": 0,
    "cep/test_against_model.py": 5,
    "cep/test_jobs.py": 5,
    "chaos": 0,
    "cli/test_cli_cluster.py": 4,
    "cli/test_cli_detached.py": 0,
    "cli/test_cli_files.py": 10,
    "cli/test_cli_history.py": 0,
    "cli/test_cli_running.py": 0,
    "cli/test_cli_savepoints.py": 0,
    "cli/test_cli_takeover.py": 0,
    "cli/test_top.py::test_an_interrupt_leaves_the_job_running": 0,
    "cli/test_without_ray.py": 4,
    "compat/test_old_logs.py": 4,
    "compat/test_old_savepoints.py": 16,
    "connectors/test_conformance.py": 6,
    "connectors/test_delta_sink.py": 3,
    "connectors/test_example_connector.py": 4,
    "connectors/test_file_compaction.py::test_any_crash": 0,
    "connectors/test_file_compaction.py::test_any_crash_on_s3": 0,
    "connectors/test_file_compaction.py::test_jobs_leave_few_files": 0,
    "connectors/test_file_sink.py::test_crash_matrix_s3": 0,
    "connectors/test_file_source.py::test_every_position": 3,
    "connectors/test_file_source.py::test_s3": 0,
    "connectors/test_function_sinks.py": 2,
    "connectors/test_generated_sources.py": 3,
    "connectors/test_http_sink.py": 3,
    "connectors/test_http_sources.py": 3,
    "connectors/test_iceberg_sink.py": 16,
    "connectors/test_ray_dataset.py": 3,
    "connectors/test_ray_dataset.py::test_the_rows_go_to_s3_and_come_from_there": 0,
    "connectors/test_s3_conformance.py": 0,
    "connectors/test_s3_credentials.py": 0,
    "connectors/test_stop_after_idle.py::test_a_pause_that_is_short_ends_nothing": 0,
    "coordinator/test_adoption_jobs.py": 5,
    "coordinator/test_backpressure_causes_jobs.py": 5,
    "coordinator/test_global_commit.py": 5,
    "coordinator/test_global_commit.py::test_no_checkpoint_completes_while_the_table_is_away": 0,
    "coordinator/test_global_commit.py::test_old_output_stays_until_the_commit_of_the_coordinator": 0,
    "coordinator/test_handles.py::test_a_job_that_cannot_begin_raises_at_the_start": 0,
    "coordinator/test_regional.py": 6,
    "coordinator/test_slot_sharing_jobs.py": 9,
    "dead_letters/test_policies.py": 5,
    "dead_letters/test_process_functions.py": 4,
    "docs/test_cdc_tutorial.py": 0,
    "docs/test_docs.py::test_the_code_of_a_page_runs": 5,
    "docs/test_docs.py::test_the_quick_start_stops_and_resumes": 0,
    "docs/test_readme.py": 0,
    "event_time/test_same_result.py": 3,
    "event_time/test_time_range.py": 4,
    "event_time/test_time_range_of_steps.py": 9,
    "formats": 6,
    "fuzz/test_fuzz.py::test_first_cases": 0,
    "golden": 9,
    "incremental": 24,
    "integration": 14,
    "integration/test_unaligned.py": 20,
    "iteration/test_jobs.py": 10,
    "joins/test_as_of.py": 3,
    "joins/test_interval.py": 3,
    "joins/test_join_jobs.py": 6,
    "joins/test_windowed.py": 3,
    "k8s/test_delete_state_s3.py": 0,
    "k8s/test_model.py::test_a_planted_bug_is_found": 0,
    "k8s/test_model.py::test_every_promise_holds_and_it_comes_to_rest": 4,
    "kafka": 0,
    "keyed/test_deduplicate.py": 6,
    "keyed/test_keyed_backends.py": 14,
    "keyed/test_reduce_ttl.py": 2,
    "keyed/test_rollback.py": 3,
    "keyed/test_running_ttl.py": 6,
    "keyed_rocksdb/test_rocksdb_checkpoints.py": 3,
    "keyed_rocksdb/test_rocksdb_checkpoints.py::test_files_do_not_pile_up_and_are_rarely_written_anew": 0,
    "keyed_rocksdb/test_rocksdb_timers.py": 3,
    "kinesis": 0,
    "liveness/test_processes.py": 0,
    "manifest/test_manifest_forms.py": 3,
    "manifest/test_manifest_twins.py::test_the_order_of_nodes_does_not_depend_on_the_process": 0,
    "messages/test_script_errors.py": 3,
    "messages/test_script_errors.py::test_what_a_function_raised_comes_with_the_users_traceback": 6,
    "monitoring/test_alerts.py": 18,
    "monitoring/test_alerts.py::test_alerts_fire_and_are_silent": 0,
    "monitoring/test_live.py": 0,
    "mqtt": 0,
    "mysql": 0,
    "mysql/test_log.py": 1,
    "nats": 0,
    "observe/test_metrics.py::test_the_list_of_jobs_shows_the_endpoints": 0,
    "operators/test_expression_limits.py::test_a_chain_of_20_000_operations_is_a_plan_error": 4,
    "operators/test_sql_against_duckdb.py::test_the_documented_differences_are_those_that_there_are": 0,
    "operators/test_sql_allowed.py::test_only_the_writer_speaks_to_polars_sql": 0,
    "operators/test_sql_limits.py": 16,
    "panes": 10,
    "postgres": 0,
    "pulsar": 0,
    "process/test_finish.py": 3,
    "process/test_jobs.py": 10,
    "process/test_programs.py": 6,
    "process/test_timers.py::test_timers_on_disk_fire_as_a_naive_model_says": 0,
    "properties": 14,
    "properties/test_cut_at_different_times.py": 10,
    "properties/test_lives.py": 0,
    "protocol/test_alternating_exhaustive.py": 6,
    "protocol/test_checkpoints_exhaustive.py": 5,
    "query/test_committed.py": 12,
    "query/test_committed_windows.py": 30,
    "query/test_direct.py": 2,
    "query/test_jobs.py::test_committed_answers_are_those_of_one_checkpoint": 3,
    "query/test_jobs.py::test_live_answers_are_the_state": 6,
    "query/test_more_windows.py": 4,
    "query/test_scan_jobs.py": 9,
    "query/test_scans.py": 3,
    "query/test_windows.py::test_a_scan_has_the_keys_that_stay": 12,
    "query/test_windows.py::test_the_windows_of_a_key": 6,
    "rabbitmq": 0,
    "recovery/test_kept_joins.py": 12,
    "recovery/test_kept_states.py::test_running_aggregates_are_taken_over": 4,
    "recovery/test_kept_states.py::test_what_is_not_kept_is_read": 0,
    "recovery/test_kept_states.py::test_values_of_a_reduce_are_taken_over": 4,
    "recovery/test_kept_windows.py": 18,
    "recovery/test_rollback.py::test_state_of_all_aggregates_goes_back": 0,
    "redis": 0,
    "rest/test_coordinators.py": 4,
    "rest/test_profiles.py": 0,
    "rest/test_profiles.py::test_profiles_over_http": 0,
    "rest/test_server.py": 4,
    "rest/test_server.py::test_every_answer_is_as_documented": 0,
    "rest/test_takeover.py": 4,
    "runs/test_file_pool.py": 3,
    "runs/test_flat_memory.py": 0,
    "runs/test_spilling_counts.py": 12,
    "runs/test_spilling_joins.py": 72,
    "runs/test_spilling_panes.py": 28,
    "runs/test_spilling_schedules.py": 10,
    "runs/test_spilling_sessions.py": 48,
    "runs/test_spilling_table.py": 6,
    "runs/test_spilling_windows.py": 18,
    "savepoints": 12,
    "savepoints/test_rescale_matrix.py": 24,
    "savepoints/test_savepoint_s3.py": 0,
    "sessions/test_session_aggregate.py": 5,
    "sessions/test_session_aggregate.py::test_equals_record_by_record_over_snapshots_and_rescales": 0,
    "sessions/test_session_aggregate.py::test_without_lateness_results_do_not_depend_on_how_batches_are_cut": 0,  # noqa: E501
    "shipping/test_unshippable.py::test_it_is_found_before_anything_starts": 4,
    "sim/test_mutants.py::test_a_planted_bug_is_found": 0,
    "sim/test_seeds.py": 14,
    "sim/test_seeds.py::test_everything_has_happened": 0,
    "sim/test_seeds.py::test_seeds": 30,
    "spark": 0,
    "spark/test_spark_forms.py": 1,
    "spark_state": 0,
    "sqs": 0,
    "state/test_accumulators.py": 3,
    "state/test_hashing.py": 4,
    "storage/test_corruption.py": 4,
    "storage/test_joblog_races.py::test_a_starter_that_sleeps_while_a_newer_one_takes_over": 4,
    "storage/test_joblog_races.py::test_a_starter_that_sleeps_while_its_slot_is_taken_and_trimmed": 4,
    "storage/test_joblog_races.py::test_a_store_that_looks_and_then_writes_is_never_silently_wrong": 0,
    "storage/test_s3_keys.py": 4,
    "storage/test_s3_keys.py::test_a_job_resumes_from_checkpoints_with_entropy": 0,
    "storage/test_s3_store.py": 5,
    "storage/test_s3_store.py::test_listings_go_on_behind_their_first_page": 0,
    "storage/test_store_conformance.py": 4,
    "strangers/test_files.py": 0,
    "strangers/test_ports.py": 3,
    "task/test_debloating_jobs.py": 5,
    "test_wheel.py": 0,
    "testing/test_connector_checks.py": 5,
    "testing/test_determinism.py": 0,
    "testing/test_harness.py": 2,
    "testing/test_histories.py": 5,
    "testing/test_histories.py::test_state_per_key": 0,
    "testing/test_histories.py::test_windows": 0,
    "typing/test_typed_uses.py": 0,
    "ui/test_all_jobs.py": 0,
    "ui/test_files.py::test_a_vendored_file_is_that_of_its_package": 0,
    "ui/test_many_subtasks.py": 0,
    "ui/test_views.py": 0,
    "windowing/test_against_model.py": 8,
    "windowing/test_on_disk_jobs.py": 9,
    "windowing/test_pre_aggregate.py::test_results_and_late_records_are_those_of_the_plain_path": 3,
    "windows/test_clocked_windows.py": 3,
    "windows/test_cuts.py": 18,
    "windows/test_window_aggregate.py::test_equals_record_by_record_over_snapshots_and_rescales": 3,
    "worker/test_registry.py::test_a_start_that_is_refused_leaves_the_job_that_runs_reachable": 0,
}
"""Of the tests below each path `make test` runs one in N, beginning with the first; N=0 runs none.

A path is a folder, a file or `file::function`, relative to `tests/`; the longest that fits counts.
"""


class Tiers:
    """Deals the tests of one collection, which must come in the same order every time."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def is_fast(self, path: str, function: str) -> bool:
        """True if `make test` runs the next test of `function` in the file `path`."""
        rule = rule_for(path, function)
        if rule is None:
            return True
        one_in, number = FAST_ONE_IN[rule], self._seen[rule]
        self._seen[rule] += 1
        return one_in > 0 and number % one_in == 0


def rule_for(path: str, function: str) -> str | None:
    """The key of `FAST_ONE_IN` that decides on a test; None if the test is fast without one."""
    parts = path.split("/")
    folders = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    fitting = [name for name in (*folders, f"{path}::{function}") if name in FAST_ONE_IN]
    return fitting[-1] if fitting else None


def left_out(path: str, expression: str) -> bool:
    """Return True if the tier that an argument of `-m` selects has no test of a file or folder."""
    if expression == FAST:
        return has_none(path)
    return expression == SLOW and path.rpartition("/")[2].startswith("test_") and all_fast(path)


def all_fast(path: str) -> bool:
    """Return True if no test of a file is slow, for which the table alone decides, but for Ray's tests."""
    rule = rule_for(path, "")
    if rule is not None and FAST_ONE_IN[rule] != 1:
        return False
    return not any(name.startswith(f"{path}::") for name in FAST_ONE_IN)


def has_none(path: str) -> bool:
    """Return True if `make test` runs no test of a file or folder, for which the table alone decides."""
    rule = rule_for(path, "")
    if path.partition("/")[0] == "kube" or (rule is not None and FAST_ONE_IN[rule] == 0):
        below = (f"{path}/", f"{path}::")
        return not any(one_in for name, one_in in FAST_ONE_IN.items() if name.startswith(below))
    return False
