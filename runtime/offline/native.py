"""State that lies in files of a state backend: downloaded, and read by the backend's own readers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from ...errors import StateError
from ...state.hashing import key_groups_of
from ...state.keygroups import KeyGroupRange
from ...state.runs.cut import RunRestorer
from ...state.runs.merge import merged
from ...state.runs.run_file import layout_of
from ...state.snapshot import KEY_GROUP_COLUMN, RestoredFiles
from .files import OpenStore
from .snapshot import PER_KEY, StatePiece, StoredState, unreadable

MERGE_BYTES: Final = 16 << 20


def native_tables(
    state: StoredState,
    piece: StatePiece,
    groups: KeyGroupRange,
    schema: pa.Schema,
    opened: OpenStore,
) -> Iterator[pa.Table]:
    """The rows of a piece with these key groups, with all columns, sorted by key group.

    Raises:
        StateError: a file is missing or corrupt, or of a format that cannot be read here.
    """
    with tempfile.TemporaryDirectory(prefix="headgate-") as directory:
        files = _downloaded(piece, groups, opened, Path(directory))
        if state.kind in PER_KEY or state.kind == "reduce":
            yield from _rocksdb(state, files, groups, schema, Path(directory))
        elif state.kind == "running":
            yield from _runs(state, files, groups, Path(directory))
        else:
            raise unreadable(state)


def _downloaded(
    piece: StatePiece, groups: KeyGroupRange, opened: OpenStore, directory: Path
) -> RestoredFiles:
    meta = next(handle for handle in piece.handles if handle.kind == "meta")
    files = {}
    for number, handle in enumerate(piece.handles):
        own = KeyGroupRange(handle.first_key_group, handle.last_key_group)
        if handle.kind == "file" and own.overlaps(groups):
            files[handle.file_id] = directory / f"download-{number}"
            opened.download(handle, files[handle.file_id])
    content = opened.content(meta)
    return RestoredFiles(content, files, meta.first_key_group, meta.last_key_group)


def _rocksdb(
    state: StoredState,
    files: RestoredFiles,
    groups: KeyGroupRange,
    schema: pa.Schema,
    directory: Path,
) -> Iterator[pa.Table]:
    try:
        from .native_rocksdb import rocksdb_tables
    except ModuleNotFoundError as error:
        if error.name != "rocksdict":
            raise
        raise StateError(
            f"the state lies in files of RocksDB, which is not installed {state.text}",
            fix="run: pip install 'headgate[rocksdb]', or take a canonical savepoint",
        ) from error
    yield from rocksdb_tables(state, files, groups, schema, directory)


def _runs(
    state: StoredState, files: RestoredFiles, groups: KeyGroupRange, directory: Path
) -> Iterator[pa.Table]:
    if not files.files:
        return
    layout = layout_of(next(iter(files.files.values())))
    restorer = RunRestorer(
        directory,
        layout,
        identity="",
        range_=(groups.first, groups.last),
        max_parallelism=state.max_parallelism,
    )
    runs, _ = restorer.runs([files])
    field = pa.field(KEY_GROUP_COLUMN, pa.int32(), False)
    for rows in merged(runs, layout, MERGE_BYTES, keep_deleted=False):
        table = layout.unpack(rows)
        owners = pa.array(key_groups_of(rows.hashes, state.max_parallelism))
        # A copy: what is unpacked lies in a buffer that the next piece overwrites.
        yield table.add_column(0, field, owners).take(pa.array(range(len(rows)), pa.int64()))
