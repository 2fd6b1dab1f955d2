"""Backends of keyed state under test, and a plain model of what they must remember."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headgate.state.codecs import codec_of
from headgate.state.keyed.base import ABSENT, KeyedBackend
from headgate.state.keyed.canonical import Layout, TableSpec
from headgate.state.keyed.keys import KeyShape, entry_codec, keys_of_type, token
from headgate.state.keyed.memory import MemoryBackend
from headgate.state.keygroups import KeyGroupRange
from headgate.state.rocksdb.backend import RocksDBBackend
from headgate.state.settings import RocksDBSettings
from headgate.state.snapshot import RestoredFiles, RestoredState, TableCut

MAX_PARALLELISM = 16
Factory = Callable[..., KeyedBackend]


class Backends:
    """Makes backends of one type."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.examples = {"memory": 150, "rocksdb": 12}[kind]
        """The number of examples of a property; opening a RocksDB takes 10 ms."""
        self.kind, self._directory = kind, directory
        self._made: list[KeyedBackend] = []
        self._number = 0

    def __call__(self, keys: KeyShape, specs: dict[str, TableSpec]) -> KeyedBackend:
        backend: KeyedBackend
        if self.kind == "memory":
            backend = MemoryBackend(keys, specs, MAX_PARALLELISM)
        else:
            self._number += 1
            backend = RocksDBBackend(
                keys,
                specs,
                MAX_PARALLELISM,
                directory=self._directory / str(self._number),
                key_groups=KeyGroupRange(0, MAX_PARALLELISM - 1),
                file_token=str(self._number),
                settings=RocksDBSettings(
                    write_buffer_bytes=1 << 20,
                    # From hardly any value to all of them in memory.
                    held_bytes=(1, 3_000, 64 << 20)[self._number % 3],
                ),
            )
        self._made.append(backend)
        return backend

    def stored(self, backend: KeyedBackend) -> RestoredState:
        """All state, as restored from a checkpoint taken now: as files where there are files."""
        state = RestoredState(states={name: spec.info for name, spec in backend.specs.items()})
        for name, cut in backend.snapshot({}).items():
            if isinstance(cut, TableCut):
                state.tables[name] = cut.make(None)
            else:
                collected = cut.collect()
                paths = {}
                for file in collected.files:
                    self._number += 1
                    paths[file.id] = shutil.copy(file.path, self._directory / f"f{self._number}")
                cut.release()
                files = RestoredFiles(collected.meta, paths, 0, MAX_PARALLELISM - 1)
                state.files[name] = [files]
        return state

    def close(self) -> None:
        """Close all that were made so far."""
        while self._made:
            self._made.pop().close()


@pytest.fixture(params=["memory", "rocksdb"])
def make_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backends]:
    """Makes backends of one type; a further backend is one more parameter."""
    backends = Backends(request.param, tmp_path)
    yield backends
    backends.close()


def spec(
    name: str,
    kind: str,
    value: Any,
    entry: Any = None,
    *,
    keys: KeyShape,
    ttl_ms: int | None = None,
    namespaced: bool = False,
    **more: Any,
) -> TableSpec:
    """One table."""
    codec = None if entry is None else codec_of(int) if kind == "list" else entry_codec(entry)
    layout = Layout(keys, kind, codec_of(value), codec, namespaced, ttl_ms is not None)
    return TableSpec(name, layout, ttl_ms, **more)


@pytest.fixture
def make_spec() -> Callable[..., TableSpec]:
    return spec


class Model:
    """The contents of the tables, as {state: {(key token, namespace, entry): value}}."""

    def __init__(self, names: Any) -> None:
        self.tables: dict[str, dict[Any, Any]] = {name: {} for name in names}

    def copy(self) -> dict[str, dict[Any, Any]]:
        return {name: dict(rows) for name, rows in self.tables.items()}


class Cutting:
    """One cut whose tables are made now, later, or in a thread beside what goes on."""

    def __init__(self, backend: KeyedBackend, model: dict[str, Any], dead: dict[str, int]) -> None:
        self.model = model
        self.cuts = backend.snapshot(dead)
        self._tables: dict[str, pa.Table] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def epochs(self) -> dict[str, int]:
        return {name: cut.epoch for name, cut in self.cuts.items() if isinstance(cut, TableCut)}

    def start(self, since: dict[str, int]) -> None:
        """Make all tables in a thread: those named in `since` as deltas."""

        def work() -> None:
            try:
                for name, cut in self.cuts.items():
                    if isinstance(cut, TableCut):
                        self._tables[name] = cut.make(since.get(name))
                    else:
                        self._tables[name] = pa.concat_tables(cut.tables())
                        cut.release()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def tables(self) -> dict[str, pa.Table]:
        assert self._thread is not None
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._tables

    def discard(self) -> None:
        for cut in self.cuts.values():
            if isinstance(cut, TableCut):
                assert cut.discard is not None
                cut.discard()
            else:
                cut.release()


@pytest.fixture
def cutting() -> type[Cutting]:
    return Cutting


def merge(base: pa.Table | None, delta: pa.Table, keys: tuple[str, ...]) -> pa.Table:
    """Do what the runtime does at a restore: the newest row of each key wins, deleted ones drop out."""
    rows: dict[Any, Any] = {}
    for table in (base, delta):
        for row in [] if table is None else table.to_pylist():
            identity = tuple(row[key] for key in keys)
            assert not (table is delta and ("seen", identity) in rows), "a key twice in one table"
            if table is delta:
                rows["seen", identity] = None
            rows[identity] = row
    kept = [
        row
        for identity, row in rows.items()
        if row is not None and not row.get("deleted") and identity[:1] != ("seen",)
    ]
    schema = delta.schema
    if "deleted" in schema.names:
        schema = schema.remove(schema.get_field_index("deleted"))
    kept.sort(key=lambda row: row["key_group"])
    return pa.Table.from_pylist(kept, schema=schema)


@pytest.fixture
def merge_tables() -> Callable[..., pa.Table]:
    return merge


def content(table: pa.Table, spec: TableSpec) -> dict[Any, Any]:
    """A canonical table in the form of the model."""
    groups = table.column("key_group").to_pylist()
    assert groups == sorted(groups)
    rows = spec.layout.rows(table)
    found = {}
    for index, key in enumerate(rows.keys):
        namespace = rows.namespaces[index] if rows.namespaces else None
        entry = rows.entries[index] if rows.entries else None
        value = rows.values[index]
        if spec.layout.with_ttl:
            value = (value, rows.last_used[index])
        place = (token(key), token(namespace), entry)
        assert place not in found
        found[place] = value
    return found


@pytest.fixture
def content_of() -> Callable[..., dict[Any, Any]]:
    return content


@pytest.fixture
def empty_model() -> type[Model]:
    return Model


def restore(
    make: Factory, keys: KeyShape, specs: dict[str, TableSpec], tables: dict[str, pa.Table]
) -> list[KeyedBackend]:
    """Backends of two subtasks, each with its half of the key groups."""
    half = MAX_PARALLELISM // 2
    backends = []
    for low, high in ((0, half), (half, MAX_PARALLELISM)):
        own = {}
        for name, table in tables.items():
            groups = table.column("key_group").to_numpy()
            own[name] = table.filter(pa.array((groups >= low) & (groups < high)))
        backend = make(keys, specs)
        infos = {name: spec.info for name, spec in specs.items()}
        backend.restore(RestoredState(tables=own, states=infos), 0)
        backends.append(backend)
    return backends


@pytest.fixture
def restore_halves() -> Callable[..., list[KeyedBackend]]:
    return restore


@pytest.fixture
def int_keys() -> KeyShape:
    return keys_of_type(int)


def read(backend: KeyedBackend, names: Any) -> dict[str, dict[Any, Any]]:
    """Return the contents of a backend, through its interface, in the form of the model."""
    found: dict[str, dict[Any, Any]] = {name: {} for name in names}
    for name in names:
        for key, namespace in list(backend.addresses(name)):
            backend.set_key(key)
            backend.set_namespace(namespace)
            place = (token(key), token(namespace))
            if backend.specs[name].layout.entry is None:
                value = backend.value_table(name).get()
                assert value is not ABSENT
                found[name][*place, None] = value
            else:
                for entry, value in backend.entry_table(name).entries():
                    found[name][*place, entry] = value
    backend.set_namespace(None)
    return found


@pytest.fixture
def read_all() -> Callable[..., Any]:
    return read


@pytest.fixture
def restored_state() -> Callable[..., RestoredState]:
    """Tables with their declarations, as after a restore."""

    def make(tables: dict[str, pa.Table], specs: dict[str, TableSpec]) -> RestoredState:
        infos = {name: spec.info for name, spec in specs.items()}
        return RestoredState(tables=dict(tables), states=infos)

    return make
