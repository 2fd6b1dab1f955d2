"""A set of runs against a dict, whatever is written, deleted, merged, pinned, reopened or sliced."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from headgate.state.hashing import key_group_of
from headgate.state.keygroups import key_group_range
from headgate.state.runs.cut import RunRestorer, files_cut, hash_range
from headgate.state.runs.layout import RowLayout
from headgate.state.runs.run_file import FilePool
from headgate.state.runs.run_set import RunSet, Version
from headgate.state.snapshot import RestoredFiles

HASHES = [
    0,
    1,
    2,
    255,
    256,
    1 << 32,
    1 << 63,
    (1 << 64) - 2,
    (1 << 64) - 1,
    *range(1 << 40, (1 << 40) + 30),
]
identities = st.tuples(
    st.one_of(st.sampled_from(HASHES), st.integers(0, (1 << 64) - 1)), st.integers(0, 2)
)
changes = st.dictionaries(identities, st.one_of(st.none(), st.integers(0, 9_999)), max_size=60)


def machine(runs: SimpleNamespace, root: Path, pool_bytes: int) -> type[RuleBasedStateMachine]:
    def name_of(identity: tuple[int, int]) -> str | None:
        return None if identity == (2, 1) else "x" * (identity[0] % 9) + f"{identity}"

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.root = Path(tempfile.mkdtemp(dir=root))
            self.pool = FilePool(Path(tempfile.mkdtemp(dir=self.root)), pool_bytes, 1)
            self.generation = 0
            self.expected: dict[tuple[int, int], Any] = {}
            self.pins: list[tuple[Version, dict[tuple[int, int], Any]]] = []
            self.set = self.new_set()

        def new_set(self) -> RunSet:
            self.generation += 1
            self.directory = self.root / str(self.generation)
            self.directory.mkdir()
            names = runs.Names(f"g{self.generation}")
            layout = RowLayout(runs.SCHEMA, wide=True)
            return RunSet(self.directory, layout, runs.TINY, names, self.pool)

        @rule(changed=changes)
        def flush(self, changed: dict[tuple[int, int], int | None]) -> None:
            rows = sorted(changed.items())
            table = runs.table_of([runs.row(name_of(key), seed or 0) for key, seed in rows])
            deleted = [seed is None for _, seed in rows]
            table = table.append_column("deleted", pa.array(deleted, pa.bool_()))
            hashes = np.array([key[0] for key, _ in rows], np.uint64)
            checks = np.array([key[1] for key, _ in rows], np.uint64)
            middle = len(rows) // 2  # a run may come in several pieces
            pieces = [
                self.set.layout.pack(hashes[part], checks[part], table[part])
                for part in (slice(0, middle), slice(middle, None))
            ]
            self.set.add(iter(pieces)).unpin()
            for key, seed in rows:
                self.expected.pop(key, None)
                if seed is not None:
                    self.expected[key] = runs.row(name_of(key), seed)

        @rule()
        def merge(self) -> None:
            self.set.merge_once()

        @rule()
        def pin(self) -> None:
            self.pins.append((self.set.pin(), dict(self.expected)))

        @rule()
        def unpin(self) -> None:
            if self.pins:
                version, expected = self.pins.pop(0)
                assert self.content(version) == expected
                version.unpin()

        def content(self, version: Version) -> dict[tuple[int, int], Any]:
            found: dict[tuple[int, int], Any] = {}
            for rows in self.set.merged(version):
                keys = zip(rows.hashes.tolist(), rows.records["check"].tolist(), strict=True)
                for key, values in zip(keys, self.set.layout.unpack(rows).to_pylist(), strict=True):
                    assert not found or key > max(found)
                    found[key] = values
            return found

        @rule(asked=st.lists(identities, max_size=40, unique=True), known=st.randoms())
        def lookup(self, asked: list[tuple[int, int]], known: Any) -> None:
            asked = list(dict.fromkeys([*asked, *self.expected]))
            known.shuffle(asked)
            found = self.set.lookup(
                np.array([key[0] for key in asked], np.uint64),
                np.array([key[1] for key in asked], np.uint64),
            )
            rows = found.table.to_pylist()
            got = {asked[at]: one for at, one in zip(found.positions.tolist(), rows, strict=True)}
            assert len(got) == len(rows)
            assert got == self.expected

        @rule(old=st.integers(1, 4), new=st.integers(1, 4))
        def rescale(self, old: int, new: int) -> None:
            """To `old` subtasks, then to `new`, then all in one; the files stay as they are."""
            cuts = self.restored(self.cut(self.set, 0, runs.MAX_PARALLELISM - 1), old)
            cuts = self.restored(cuts, new)
            self.set, self.directory = self.take_over(cuts, 0, runs.MAX_PARALLELISM - 1)
            self.pins.clear()

        def restored(self, cuts: list[RestoredFiles], parallelism: int) -> list[RestoredFiles]:
            written = []
            for subtask in range(parallelism):
                own = key_group_range(subtask, parallelism, runs.MAX_PARALLELISM)
                mine, _ = self.take_over(cuts, own.first, own.last)
                written += self.cut(mine, own.first, own.last)
            return written

        def take_over(
            self, cuts: list[RestoredFiles], first: int, last: int
        ) -> tuple[RunSet, Path]:
            mine = self.new_set()
            restorer = RunRestorer(
                self.directory, mine.layout, identity="1", range_=(first, last),
                max_parallelism=runs.MAX_PARALLELISM, pool=self.pool,
            )  # fmt: skip
            overlapping = [
                one for one in cuts if one.first_key_group <= last and one.last_key_group >= first
            ]
            found, same = restorer.runs(overlapping)
            assert same
            mine.adopt(found)
            return mine, self.directory

        def cut(self, of: RunSet, first: int, last: int) -> list[RestoredFiles]:
            """A checkpoint of a set, its files copied away."""
            version: Future[Version] = Future()
            version.set_result(of.pin())
            cut = files_cut(
                of, version, identity="1", keys=("name",), max_parallelism=runs.MAX_PARALLELISM
            )
            collected = cut.collect()
            store = Path(tempfile.mkdtemp(dir=self.root))
            files = {}
            for file in collected.files:
                files[file.id] = store / file.id
                shutil.copy(file.path, files[file.id])
            cut.release()
            return [RestoredFiles(collected.meta, files, first, last)]

        @invariant()
        def all_rows_are_there(self) -> None:
            version = self.set.pin()
            assert self.content(version) == self.expected
            version.unpin()

        @invariant()
        def no_file_is_left_over_or_missing(self) -> None:
            versions = [self.set.version, *(version for version, _ in self.pins)]
            needed = {
                segment.file.file.path
                for version in versions
                for run in version.runs
                for segment in run.segments
            }
            assert set(self.directory.iterdir()) == needed

        @invariant()
        def the_number_of_runs_is_bounded(self) -> None:
            if not self.set.wants_merge:
                assert len(self.set.version.runs) <= runs.TINY.runs_max

        def teardown(self) -> None:
            for version, _ in self.pins:
                version.unpin()
            self.pins.clear()
            self.set.clear()
            self.pool.close()
            left = list(self.directory.iterdir())
            shutil.rmtree(self.root)
            assert not left

    return Machine


@pytest.mark.parametrize("pool_bytes", [0, 20_000])
def test_runs_behave_like_a_dict(runs: SimpleNamespace, tmp_path: Path, pool_bytes: int) -> None:
    run_state_machine_as_test(
        machine(runs, tmp_path, pool_bytes),
        settings=settings(
            max_examples=25,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("max_parallelism", [1, 2, 3, 7, 128, 1000, 32768])
def test_the_range_of_hashes_of_key_groups_is_exact(max_parallelism: int) -> None:
    for group in {0, max_parallelism // 2, max_parallelism - 1}:
        first, last = hash_range(group, group, max_parallelism)
        assert key_group_of(first, max_parallelism) == group
        assert key_group_of(last, max_parallelism) == group
        assert first == 0 or key_group_of(first - 1, max_parallelism) == group - 1
        assert last == (1 << 64) - 1 or key_group_of(last + 1, max_parallelism) == group + 1
