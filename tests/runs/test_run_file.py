"""Run files: what they hold comes back; what is damaged is named."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.errors import StateError, StorageError
from headgate.state.runs.layout import PackedRows, RowLayout
from headgate.state.runs.merge import merged
from headgate.state.runs.run import Run, Segment
from headgate.state.runs.run_file import MappedFile, RunFile, write_run_file


@pytest.fixture
def rows(runs: SimpleNamespace, layout: RowLayout) -> PackedRows:
    names = [f"name {number}" if number % 7 else None for number in range(100)]
    hashes = np.arange(100, dtype=np.uint64) << np.uint64(50)
    table = runs.table_of([runs.row(name, seed) for seed, name in enumerate(names)])
    return layout.pack(hashes, hashes[::-1].copy(), table)


def opened(path: Path, layout: RowLayout) -> MappedFile:
    return MappedFile(RunFile(path.stem, path), layout, verify=True)


def test_rows_come_back(
    runs: SimpleNamespace, layout: RowLayout, rows: PackedRows, tmp_path: Path
) -> None:
    path = tmp_path / "a.arrow"
    write_run_file(path, layout, rows)
    file = opened(path, layout)
    assert layout.unpack(file.rows).equals(layout.unpack(rows))
    assert layout.unpack(file.rows).column("number").null_count == 20
    assert file.rows.hashes.tolist() == rows.hashes.tolist()
    assert file.rows.records["check"].tolist() == rows.records["check"].tolist()
    # It is an Arrow file that others can open.
    assert pa.ipc.open_file(path).read_all().num_rows == 100


def test_a_slice_is_written_as_what_it_is(
    layout: RowLayout, rows: PackedRows, tmp_path: Path
) -> None:
    path = tmp_path / "a.arrow"
    write_run_file(path, layout, rows.slice(13, 29))
    file = opened(path, layout)
    assert layout.unpack(file.rows).equals(layout.unpack(rows.slice(13, 29)))


def test_every_flipped_byte_of_the_data_is_noticed(
    layout: RowLayout, rows: PackedRows, tmp_path: Path
) -> None:
    path = tmp_path / "a.arrow"
    write_run_file(path, layout, rows.slice(0, 10))
    whole = path.read_bytes()
    first = opened(path, layout).records_at
    size = layout.dtype.itemsize * 10
    for at in range(first, first + size, 37):
        broken = bytearray(whole)
        broken[at] ^= 0x10
        path.write_bytes(broken)
        with pytest.raises(StateError, match=r"damaged file=`.*a\.arrow` reason=`checksum="):
            opened(path, layout)


def test_a_truncated_file_is_named(layout: RowLayout, rows: PackedRows, tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_run_file(path, layout, rows)
    whole = path.read_bytes()
    for size in (0, 1, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(StateError, match=r"a run file is damaged file=`.*a\.arrow`"):
            opened(path, layout)


def test_a_missing_file_is_named(layout: RowLayout, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"damaged file=`.*b\.arrow`"):
        opened(tmp_path / "b.arrow", layout)


def test_what_the_system_refuses_is_not_taken_for_damage(
    layout: RowLayout,
    rows: PackedRows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restore that falls back to an older checkpoint because of it would lose what came since."""
    path = tmp_path / "a.arrow"
    write_run_file(path, layout, rows)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    run = Run([Segment(opened(path, layout), 0, len(rows))])
    refused = r"cannot read a run file file=`.*a\.arrow` reason=`.*Too many open files`"
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        with pytest.raises(StorageError, match=refused):
            opened(path, layout)
    for call in ("open", "preadv"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            with pytest.raises(StorageError, match=refused):
                list(merged([run], layout, 1_000, keep_deleted=False))
    path.unlink()
    with pytest.raises(StateError, match="damaged"):
        list(merged([run], layout, 1_000, keep_deleted=False))


def test_other_columns_are_refused(
    runs: SimpleNamespace, layout: RowLayout, rows: PackedRows, tmp_path: Path
) -> None:
    path = tmp_path / "a.arrow"
    write_run_file(path, layout, rows)
    with pytest.raises(
        StateError, match=r"does not fit this job file=`.*` found=`name string, number"
    ):
        opened(path, RowLayout(runs.SCHEMA.remove(1), wide=True))
    with pytest.raises(StateError, match="does not fit this job"):
        opened(path, RowLayout(runs.SCHEMA, wide=False))


def test_an_arrow_file_that_is_no_run_is_refused(layout: RowLayout, tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"a": [1]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(StateError, match="not one of a run"):
        opened(path, layout)


def test_a_full_disk_is_a_storage_error(layout: RowLayout, rows: PackedRows) -> None:
    with pytest.raises(StorageError, match=r"cannot write a run file file=`/dev/full`"):
        write_run_file(Path("/dev/full"), layout, rows)


def test_more_than_64_columns_with_nulls(tmp_path: Path) -> None:
    schema = pa.schema([pa.field(f"c{number}", pa.int32()) for number in range(140)])
    layout = RowLayout(schema, wide=False)
    table = pa.table(
        [pa.array([number, None, -number], pa.int32()) for number in range(140)], schema=schema
    )
    packed = layout.pack(np.arange(3, dtype=np.uint64), None, table)
    assert layout.unpack(packed).equals(table)
    assert not layout.deleted(packed.records).any()


def test_a_dictionary_is_refused() -> None:
    schema = pa.schema([pa.field("c", pa.dictionary(pa.int8(), pa.string()))])
    with pytest.raises(StateError, match="dictionary column cannot lie in a run column=`c`"):
        RowLayout(schema, wide=False)
