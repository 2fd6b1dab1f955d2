"""Which tests `make test` runs, and which are left to `make test-rest`.

`make test` shall take at most five minutes on two cores, and find most mistakes: a contributor runs it
before each commit. A test belongs to it unless the table below says otherwise, or it starts Ray or kills
processes (marks `ray` and `chaos`). tests/README.md explains how to choose.
"""

from __future__ import annotations

from collections import Counter

FAST_ONE_IN: dict[str, int] = {
    "aggregates": 2,
    "async_io/test_lab.py": 4,
    "batch/test_batch_golden.py": 6,
    "benchmarks": 5,
    "cep/test_against_model.py": 3,
    "cep/test_jobs.py": 3,
    "chaos": 0,
    "cli/test_cli_cluster.py": 4,
    "cli/test_cli_files.py": 5,
    "cli/test_cli_running.py": 0,
    "cli/test_cli_running.py::test_list_checkpoint_stop_and_resume": 1,
    "cli/test_cli_savepoints.py": 0,
    "cli/test_cli_takeover.py": 0,
    "cli/test_without_ray.py": 4,
    "compat/test_old_savepoints.py": 3,
    "coordinator/test_regional.py": 4,
    "dead_letters/test_process_functions.py": 4,
    "docs/test_readme.py": 0,
    "event_time/test_time_range.py": 4,
    "golden": 5,
    "incremental": 7,
    "integration": 7,
    "iteration/test_jobs.py": 5,
    "joins/test_interval.py": 3,
    "joins/test_join_jobs.py": 4,
    "joins/test_windowed.py": 3,
    "k8s/test_delete_state_s3.py": 0,
    "keyed/test_keyed_backends.py": 5,
    "keyed_rocksdb/test_rocksdb_checkpoints.py": 3,
    "manifest/test_manifest_forms.py": 3,
    "monitoring/test_live.py": 0,
    "operators/test_sql_limits.py": 8,
    "panes": 5,
    "process/test_jobs.py": 5,
    "properties": 8,
    "properties/test_lives.py": 0,
    "protocol/test_alternating_exhaustive.py": 3,
    "protocol/test_checkpoints_exhaustive.py": 5,
    "runs/test_spilling_table.py": 3,
    "runs/test_spilling_windows.py": 6,
    "savepoints": 4,
    "savepoints/test_rescale_matrix.py": 8,
    "savepoints/test_savepoint_s3.py": 0,
    "sessions/test_session_aggregate.py": 5,
    "sim/test_mutants.py::test_a_planted_bug_is_found": 0,
    "sim/test_seeds.py": 5,
    "sim/test_seeds.py::test_everything_has_happened": 0,
    "sim/test_seeds.py::test_seeds": 10,
    "spark": 0,
    "spark/test_spark_forms.py": 1,
    "spark_state": 0,
    "state/test_hashing.py": 2,
    "storage/test_corruption.py": 4,
    "storage/test_s3_store.py": 3,
    "testing/test_determinism.py": 0,
    "testing/test_histories.py": 3,
    "typing/test_typed_uses.py": 0,
    "windowing/test_against_model.py": 4,
    "windows/test_clocked_windows.py": 3,
    "windows/test_cuts.py": 6,
}
"""Of the tests below these paths `make test` runs one in so many, beginning with the first; 0: none.

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
