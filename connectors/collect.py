"""A sink that keeps all records for the program that ran the job, for tests and small results.

Records go to a list in this process or, with a path, to files, where the program finds them even if the
job ran in other processes. Records arrive in *portions*, each with a name; keeping a portion twice
changes nothing, so commits can be repeated.
"""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import cloudpickle
import msgspec

from ..operators.base import OperatorContext
from ..operators.elements import Batch, ColumnBatch
from ..operators.sink import (
    Guarantee,
    GuaranteeLike,
    IfExists,
    IfExistsLike,
    OutputFile,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
    parse_if_exists,
)
from ..state.snapshot import CommitPermit
from .files.drafts import delete_files, files_in

_SUFFIX: Final = ".pickle"
_ids = itertools.count(1)
_memory: dict[int, dict[str, list[Any]]] = {}
"""The portions of each sink of this process, by name."""


class _Store(Protocol):
    def keep(self, name: str, records: list[Any]) -> None:
        """Keep a portion; a second one of the same name replaces the first."""
        ...

    def portions(self) -> list[list[Any]]:
        """Return all portions, in the order in which they were kept."""
        ...

    def names(self) -> list[str]:
        """Return the names of all portions."""
        ...


class _Memory(msgspec.Struct, frozen=True):
    id: int

    def keep(self, name: str, records: list[Any]) -> None:
        _memory.setdefault(self.id, {})[name] = records

    def portions(self) -> list[list[Any]]:
        return list(_memory.get(self.id, {}).values())

    def names(self) -> list[str]:
        return list(_memory.get(self.id, ()))

    def clear(self) -> None:
        """Begin with no rows: only this program had them, and it runs the job once more."""
        _memory.pop(self.id, None)


class _Files(msgspec.Struct, frozen=True):
    path: str

    def keep(self, name: str, records: list[Any]) -> None:
        directory = Path(self.path)
        directory.mkdir(parents=True, exist_ok=True)
        draft = directory / f".{name}"
        draft.write_bytes(cloudpickle.dumps(records))
        os.replace(draft, directory / f"{name}{_SUFFIX}")

    def portions(self) -> list[list[Any]]:
        names = sorted(file.name for file in self.files())
        return [pickle.loads((Path(self.path) / name).read_bytes()) for name in names]

    def names(self) -> list[str]:
        return [file.name.removesuffix(_SUFFIX) for file in self.files()]

    def files(self) -> list[OutputFile]:
        """Return the file of each portion."""
        found = files_in(self.path)
        return [f for f in found if f.name.endswith(_SUFFIX) and not f.name.startswith(".")]


class _Portion(msgspec.Struct):
    name: str
    records: bytes


class CollectSink(Sink):
    """A sink whose records are in `rows`."""

    guarantees = frozenset(Guarantee)

    def __init__(
        self, store: _Memory | _Files, guarantee: Guarantee, if_exists: IfExists = IfExists.ERROR
    ) -> None:
        self.guarantee = guarantee
        self.if_exists = if_exists
        self.pickled = guarantee is Guarantee.EXACTLY_ONCE
        self.place = store.path if isinstance(store, _Files) else ""
        self._store = store

    @property
    def rows(self) -> list[Any]:
        """The records that have arrived so far: objects, or a dict per row of columns."""
        return [record for portion in self._store.portions() for record in portion]

    def list_output(self, run: SinkRun) -> list[OutputFile] | None:
        return self._store.files() if isinstance(self._store, _Files) else None

    def delete_output(self, run: SinkRun, files: list[OutputFile]) -> int:
        return delete_files(self.place, files)

    def begin_output(self, run: SinkRun) -> None:
        policy = run.if_exists or self.if_exists
        if isinstance(self._store, _Memory) and policy is not IfExists.APPEND:
            self._store.clear()

    def writer(self) -> SinkWriter:
        return CollectWriter(self._store, self.guarantee)

    def describe(self) -> str:
        return "collect()"


class CollectWriter(SinkWriter):
    """Makes a portion of the records between two barriers or, without exactly-once, of each batch."""

    def __init__(self, store: _Store, guarantee: Guarantee) -> None:
        self._store = store
        self._staged = guarantee is Guarantee.EXACTLY_ONCE
        self._records: list[Any] = []
        self._number = itertools.count()

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        # A job that begins with the savepoint of another job counts its attempts from 1 again, and still
        # holds portions of that job. The number of the restored checkpoint tells them apart.
        attempt, subtask = f"{context.attempt:06}", f"{context.subtask_index:05}"
        self._prefix = f"{attempt}-{subtask}-{context.restored_checkpoint:08}"

    def prepare(self) -> None:
        # Runs in other storages, or without any, count their attempts in the same way. Their portions
        # must be neither replaced nor confused with those of this run.
        names = [name.rpartition(".") for name in self._store.names()]
        taken = [int(number) for prefix, _, number in names if prefix == self._prefix]
        self._number = itertools.count(max(taken, default=-1) + 1)

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
    """Keep all records, which can then be read from `.rows` of the returned sink.

    Args:
        path: a directory that all processes of the job can reach. Without it records are kept in memory,
            and only a job that runs in this process can be collected.
        guarantee: with `exactly_once` records appear when their checkpoint is complete.
        if_exists: what happens to the files of earlier runs at `path` when a run starts without state:
            `error` refuses the run, `append` keeps them, `overwrite` deletes them as soon as the run has
            committed records of its own. In memory such a run begins with no rows, except with `append`.
    """
    store: _Memory | _Files = _Memory(next(_ids)) if path is None else _Files(os.path.abspath(path))
    return CollectSink(store, parse_guarantee(guarantee), parse_if_exists(if_exists))
