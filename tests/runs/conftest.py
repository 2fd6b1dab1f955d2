"""The common parts of the tests of runs: rows of all sorts of columns, and a delta made of a dict."""

from __future__ import annotations

import decimal
import itertools
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.state.keygroups import KeyGroupRange
from headgate.state.runs.layout import RowLayout
from headgate.state.runs.spilling_table import SpillingTable, TableShape
from headgate.state.settings import RunSettings

SCHEMA = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("number", pa.int64()),
        pa.field("flag", pa.bool_()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("small", pa.int16()),
        pa.field("when", pa.timestamp("us")),
        pa.field("raw", pa.binary(3)),
        pa.field("list", pa.list_(pa.int32())),
    ]
)
TINY = RunSettings(
    memory_bytes=2_000, file_bytes=700, runs_per_level=2, runs_max=4, runs_stop=6, merge_bytes=500,
    mapped_bytes=3_000,
)  # fmt: skip
MAX_PARALLELISM = 128


def row(name: str | None, seed: int) -> dict[str, Any]:
    """A row that `seed` determines; one value in five is null."""
    values = {
        "name": name,
        "number": seed * 7919 - 5,
        "flag": seed % 2 == 0,
        "price": decimal.Decimal(seed % 10_000) / 100,
        "small": seed % 100,
        "when": np.datetime64(seed, "us").item(),
        "raw": seed.to_bytes(3, "little"),
        "list": [seed % 5] * (seed % 3),
    }
    for index, column in enumerate(SCHEMA.names[1:]):
        if (seed + index) % 5 == 0:
            values[column] = None
    return values


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def lanes_of(names: list[str | None]) -> tuple[Any, Any]:
    """Hashes that collide often: a name `a#b` hashes by `a` alone, the check lane tells them apart."""
    keys = [(name or "none").encode() for name in names]
    firsts = [zlib.crc32(key.split(b"#")[0]) for key in keys]
    hashes = np.array([(first << 32 | first) ^ 0xFFFF for first in firsts], np.uint64)
    return hashes, np.array([zlib.crc32(key) for key in keys], np.uint64)


def identify(table: pa.Table) -> tuple[Any, Any]:
    return lanes_of(table.column("name").to_pylist())


class DictDelta:
    """The simplest delta there is: rows in a list."""

    def __init__(self) -> None:
        self.names: list[str | None] = []
        self.rows: list[dict[str, Any]] = []

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def nbytes(self) -> int:
        return 100 * len(self.names)

    @property
    def held_bytes(self) -> int:
        return self.nbytes

    def add(self, names: list[str]) -> tuple[Any, Any]:
        """Give names slots; returns those of new ones, and their positions."""
        known = dict(zip(self.names, itertools.count(), strict=False))
        fresh = [name for name in dict.fromkeys(names) if name not in known]
        self.names += fresh
        self.rows += [{**dict.fromkeys(SCHEMA.names), "name": name} for name in fresh]
        return np.arange(len(self.names) - len(fresh), len(self.names)), fresh

    def lanes(self) -> tuple[Any, Any]:
        return lanes_of(self.names)

    def find(self, hashes: Any, checks: Any) -> Any:
        mine = [(int(h), int(c)) for h, c in zip(*self.lanes(), strict=True)]
        slots = dict(zip(mine, itertools.count(), strict=False))
        asked = zip(hashes.tolist(), checks.tolist(), strict=True)
        return np.array([slots.get(one, -1) for one in asked], np.int32)

    def table(self, slots: Any) -> pa.Table:
        return table_of([self.rows[slot] for slot in slots.tolist()])

    def load(self, slots: Any, table: pa.Table) -> None:
        for slot, values in zip(slots.tolist(), table.to_pylist(), strict=True):
            assert values["name"] == self.names[slot]
            self.rows[slot] = values

    def clear(self) -> None:
        self.names, self.rows = [], []


def inline(call: Callable[[], Any]) -> Future[Any]:
    """Runs at once what would run in a thread."""
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


class Names:
    """File ids."""

    def __init__(self, prefix: str) -> None:
        self._numbers, self._prefix = itertools.count(), prefix

    def __call__(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"


def shape(
    key_groups: KeyGroupRange | None = None,
    identity: str = "1",
    identify: Any = identify,
    expired: Any = None,
) -> TableShape:
    return TableShape(
        schema=SCHEMA,
        keys=("name",),
        wide=True,
        identity=identity,
        identify=identify,
        key_groups=key_groups or KeyGroupRange(0, MAX_PARALLELISM - 1),
        max_parallelism=MAX_PARALLELISM,
        expired=expired,
    )


def new_table(
    directory: Path,
    prefix: str,
    *,
    submit: Any = inline,
    settings: RunSettings = TINY,
    **of_shape: Any,
) -> SpillingTable[DictDelta]:
    directory.mkdir(exist_ok=True, parents=True)
    return SpillingTable(shape(**of_shape), DictDelta, directory, Names(prefix), settings, submit)


def fetch(table: SpillingTable[DictDelta], slots: Any, hashes: Any, checks: Any) -> None:
    """Load the state of keys that have just become `slots` of the delta, as far as there is any."""
    found = table.lookup(hashes, checks)
    if found is not None:
        table.delta.load(slots[found.positions], found.table)


def everything(table: SpillingTable[DictDelta]) -> dict[str, dict[str, Any]]:
    """All rows of a table, by name."""
    cut = table.snapshot()
    try:
        return content(cut.tables())
    finally:
        cut.release()


def upsert(table: SpillingTable[DictDelta], names: list[str], seed: int) -> None:
    """Read, modify, write: the number of a key counts how often it came."""
    slots, fresh = table.delta.add(names)
    fetch(table, slots, *lanes_of(fresh))
    at = {name: slot for slot, name in enumerate(table.delta.names)}
    for name in names:
        before = table.delta.rows[at[name]]["small"] or 0
        table.delta.rows[at[name]] = {**row(name, seed), "small": before + 1}
    table.settle()


def content(tables: Any) -> dict[str, dict[str, Any]]:
    """Tables as rows by name; a name comes once, and key groups ascend."""
    rows = [one for table in tables for one in table.to_pylist()]
    groups = [one.pop("key_group", 0) for one in rows]
    assert groups == sorted(groups)
    found = {one["name"]: one for one in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture
def runs() -> SimpleNamespace:
    """The helpers above (test directories are no packages)."""
    return SimpleNamespace(**globals())


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


@pytest.fixture
def layout() -> RowLayout:
    return RowLayout(SCHEMA, wide=True)
