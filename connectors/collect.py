"""A sink that keeps all records for the program that ran the job to look at; for tests and small results.

Records go to a list in this process, or, with a path, to files, so that they are found again when the job
ran in other processes. Records arrive in *portions*, each with a name; keeping a portion twice changes
nothing, so commits can be repeated.
"""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import msgspec

from ..operators.base import OperatorContext
from ..operators.elements import Batch, ColumnBatch
from ..operators.sink import (
    Guarantee,
    GuaranteeLike,
    IfExists,
    IfExistsLike,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
    parse_if_exists,
    settle_output,
)
from ..state.snapshot import CommitPermit

_ids = itertools.count(1)
_memory: dict[int, dict[str, list[Any]]] = {}
"""Portions by name, per sink of this process."""


class _Store(Protocol):
    def keep(self, name: str, records: list[Any]) -> None:
        """Keep a portion; a second one of the same name replaces the first."""
        ...

    def portions(self) -> list[list[Any]]:
        """All portions, in the order they were kept."""
        ...

    def settle(self, run: SinkRun, own: IfExists, *, delete: bool) -> None:
        """Deal with portions of earlier runs; without `delete` only check that the run may begin."""
        ...


class _Memory(msgspec.Struct, frozen=True):
    id: int

    def keep(self, name: str, records: list[Any]) -> None:
        _memory.setdefault(self.id, {})[name] = records

    def portions(self) -> list[list[Any]]:
        return list(_memory.get(self.id, {}).values())

    def settle(self, run: SinkRun, own: IfExists, *, delete: bool) -> None:
        if delete and (run.if_exists or own) is not IfExists.APPEND:
            _memory.pop(self.id, None)  # only this program had them, and it runs the job once more


class _Files(msgspec.Struct, frozen=True):
    path: str

    def keep(self, name: str, records: list[Any]) -> None:
        directory = Path(self.path)
        directory.mkdir(parents=True, exist_ok=True)
        draft = directory / f".{name}"
        draft.write_bytes(cloudpickle.dumps(records))
        os.replace(draft, directory / f"{name}.pickle")

    def portions(self) -> list[list[Any]]:
        return [pickle.loads(file.read_bytes()) for file in self._files()]

    def settle(self, run: SinkRun, own: IfExists, *, delete: bool) -> None:
        files = self._files()

        def delete_all() -> None:
            for file in files:
                file.unlink(missing_ok=True)

        settle_output(run, own, len(files), self.path, delete_all if delete else None)

    def _files(self) -> list[Path]:
        files = sorted(Path(self.path).glob("*.pickle"))
        return [file for file in files if not file.name.startswith(".")]


class _Portion(msgspec.Struct):
    name: str
    records: bytes


class CollectSink(Sink):
    """Keeps records; `rows` has them."""

    guarantees = frozenset(Guarantee)

    def __init__(
        self, store: _Store, guarantee: Guarantee, if_exists: IfExists = IfExists.ERROR
    ) -> None:
        self.guarantee = guarantee
        self.if_exists = if_exists
        self.pickled = guarantee is Guarantee.EXACTLY_ONCE
        self._store = store

    @property
    def rows(self) -> list[Any]:
        """What has arrived so far: objects, or a dict per row of columns."""
        return [record for portion in self._store.portions() for record in portion]

    def check_output(self, run: SinkRun) -> None:
        self._store.settle(run, self.if_exists, delete=False)

    def begin_output(self, run: SinkRun) -> None:
        self._store.settle(run, self.if_exists, delete=True)

    def writer(self) -> SinkWriter:
        return CollectWriter(self._store, self.guarantee)

    def describe(self) -> str:
        return "collect()"


class CollectWriter(SinkWriter):
    """Makes a portion of what comes between two barriers, or, without exactly-once, of each batch."""

    def __init__(self, store: _Store, guarantee: Guarantee) -> None:
        self._store = store
        self._staged = guarantee is Guarantee.EXACTLY_ONCE
        self._records: list[Any] = []
        self._number = itertools.count()

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        # A job that begins with another's savepoint counts its attempts anew, and still holds portions
        # of that job: the number of what it began with tells them apart.
        attempt, subtask = f"{context.attempt:06}", f"{context.subtask_index:05}"
        self._prefix = f"{attempt}-{subtask}-{context.restored_checkpoint:08}"

    def write(self, batch: Batch) -> None:
        self._records += batch.data.to_pylist() if isinstance(batch, ColumnBatch) else batch.records
        if not self._staged:
            self._store.keep(*self._portion())

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        if not self._records:
            return None
        name, records = self._portion()
        return lambda: [msgspec.msgpack.encode(_Portion(name, cloudpickle.dumps(records)))]

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        for committable in committables:
            portion = msgspec.msgpack.decode(committable, type=_Portion)
            self._store.keep(portion.name, pickle.loads(portion.records))

    def _portion(self) -> tuple[str, list[Any]]:
        records, self._records = self._records, []
        return f"{self._prefix}.{next(self._number):08}", records


def collect(
    *,
    path: str | None = None,
    guarantee: GuaranteeLike = "at_least_once",
    if_exists: IfExistsLike = "error",
) -> CollectSink:
    """Keep all records; read them from `.rows` of what this returns.

    Args:
        path: a directory that all processes of the job reach. Without it records are kept in memory, and
            only a job that runs in this process can be collected.
        guarantee: with `exactly_once` records show up when their checkpoint is complete.
        if_exists: what happens to the files of earlier runs at `path` when a run starts without state:
            `error` refuses the run, `append` keeps them, `overwrite` deletes them first. In memory such
            a run begins with no rows, except with `append`.
    """
    store: _Store = _Memory(next(_ids)) if path is None else _Files(os.path.abspath(path))
    return CollectSink(store, parse_guarantee(guarantee), parse_if_exists(if_exists))
