"""Files that are written over: only those that have no readers any more, and no other name."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headgate.state.runs.layout import PackedRows, RowLayout
from headgate.state.runs.run import RunWriter
from headgate.state.runs.run_file import FilePool
from headgate.state.runs.spilling_table import SpillingTable


@pytest.fixture
def pool(tmp_path: Path) -> FilePool:
    directory = tmp_path / "pool"
    directory.mkdir()
    return FilePool(directory, 100_000, 1_000)


@pytest.fixture
def writer(runs: SimpleNamespace, tmp_path: Path, layout: RowLayout, pool: FilePool) -> RunWriter:
    return RunWriter(tmp_path, layout, 10**6, runs.Names("a"), pool)


def rows_of(runs: SimpleNamespace, layout: RowLayout, count: int, seed: int) -> PackedRows:
    names = [f"{seed} {number}" for number in range(count)]
    hashes = np.arange(count, dtype=np.uint64) << np.uint64(40)
    table = runs.table_of([runs.row(name, seed + at) for at, name in enumerate(names)])
    return layout.pack(hashes, hashes, table)


def written(writer: RunWriter, rows: PackedRows) -> Any:
    run = writer.write([rows])
    assert run is not None
    return run


VIEWS: dict[str, Callable[[PackedRows], Any]] = {
    "hashes": lambda rows: rows.hashes[5:50:3],
    "records": lambda rows: rows.records["_number"][10:],
    "text": lambda rows: rows.variable[0].slice(3, 7),
    "list": lambda rows: rows.variable[1].values,
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_file_is_not_written_over_while_anything_refers_to_its_pages(
    runs: SimpleNamespace, layout: RowLayout, pool: FilePool, writer: RunWriter, view: str
) -> None:
    run = written(writer, rows_of(runs, layout, 100, 1))
    file = run.segments[0].file.file
    held = VIEWS[view](run.segments[0].rows)
    inode = os.stat(file.path).st_ino
    before = str(held.tolist())
    file.unpin()
    del run
    gc.collect()
    assert pool.nbytes == 0
    other = written(writer, rows_of(runs, layout, 100, 2))
    assert os.stat(other.segments[0].file.file.path).st_ino != inode
    assert str(held.tolist()) == before
    del held
    assert pool.nbytes > 0
    again = written(writer, rows_of(runs, layout, 60, 3))
    segment = again.segments[0]
    assert os.stat(segment.file.file.path).st_ino == inode
    assert layout.unpack(segment.rows).equals(layout.unpack(rows_of(runs, layout, 60, 3)))
    assert segment.file.size_bytes == os.stat(segment.file.file.path).st_size
    assert pool.nbytes == 0


def test_a_pinned_file_is_not_given_up(
    runs: SimpleNamespace, layout: RowLayout, pool: FilePool, writer: RunWriter
) -> None:
    run = written(writer, rows_of(runs, layout, 100, 1))
    file = run.segments[0].file.file
    file.pin()
    file.unpin()
    del run
    assert pool.nbytes == 0
    assert file.path.exists()  # an upload reads it by its name
    file.unpin()
    assert pool.nbytes > 0
    assert not file.path.exists()


def test_a_file_with_another_name_is_left_alone(
    runs: SimpleNamespace, tmp_path: Path, layout: RowLayout, pool: FilePool, writer: RunWriter
) -> None:
    run = written(writer, rows_of(runs, layout, 100, 1))
    file = run.segments[0].file.file
    os.link(file.path, tmp_path / "checkpoint")
    content = (tmp_path / "checkpoint").read_bytes()
    file.unpin()
    del run
    assert pool.nbytes == 0
    assert not file.path.exists()
    written(writer, rows_of(runs, layout, 100, 2))
    assert (tmp_path / "checkpoint").read_bytes() == content


def test_the_pool_has_bounds(tmp_path: Path) -> None:
    pool = FilePool(tmp_path, 5_000, 1_000)
    for size in (900, 3_000, 2_500, 2_000):
        path = tmp_path / f"{size}.arrow"
        path.write_bytes(b"x" * size)
        pool.offer(path)
        assert not path.exists()
    assert pool.nbytes == 5_000
    assert sorted(path.stat().st_size for path in tmp_path.iterdir()) == [2_000, 3_000]
    assert pool.take(tmp_path / "taken")
    assert pool.nbytes == 3_000
    pool.offer(tmp_path / "not there")
    pool.close()
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    pool.offer(tmp_path / "taken")
    assert not list(tmp_path.iterdir())
    assert not pool.take(tmp_path / "taken")


@pytest.mark.parametrize("threaded", [False, True])
def test_a_table_uses_files_again(
    runs: SimpleNamespace, tmp_path: Path, threads: Any, threaded: bool
) -> None:
    (tmp_path / "table").mkdir()
    pool = FilePool(tmp_path / "table", 50_000, 1)
    table = SpillingTable(
        runs.shape(), runs.DictDelta, tmp_path / "table", runs.Names("a"),
        replace(runs.TINY, file_bytes=4_000), threads if threaded else runs.inline, pool=pool,
    )  # fmt: skip
    expected: dict[str, int] = {}
    cuts = []
    used_again = 0
    for step in range(60):
        before = pool.nbytes
        names = [f"{(step * 7 + number * 5) % 90}#{number % 2}" for number in range(20)]
        runs.upsert(table, names, step)
        for name in names:
            expected[name] = expected.get(name, 0) + 1
        if step % 12 == 3:
            cut = table.snapshot()
            cuts.append(
                (cut, dict(expected), [(f.path, f.path.read_bytes()) for f in cut.collect().files])
            )
        used_again += pool.nbytes < before
    assert used_again or threaded  # in threads: when a file becomes free is a matter of luck
    for cut, counts, files in cuts:
        assert all(path.read_bytes() == content for path, content in files)
        found = runs.content(cut.tables())
        assert {name: row["small"] for name, row in found.items()} == counts
        cut.release()
    table.close()
    pool.close()
    assert not list((tmp_path / "table").iterdir())
