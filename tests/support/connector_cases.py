"""The connectors of headgate as cases of its conformance kit."""

from __future__ import annotations

import asyncio
import csv
import itertools
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from headgate.connectors import (
    Epoch,
    collect,
    files_sink,
    files_source,
    from_list,
    function_sink,
    write_ahead_sink,
)
from headgate.operators.elements import Batch, ColumnBatch, ObjectBatch
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.operators.source import Source
from headgate.testing.connectors import (
    Case,
    Feature,
    SinkCase,
    SourceCase,
)
from headgate.testing.proxy import CuttingProxy

if TYPE_CHECKING:
    pass

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
NOWHERE = "127.0.0.1:1"
"""An address at which nothing listens."""
PASSWORD = "no-password-of-ours"
"""A password that no server takes."""
_numbers = itertools.count()


class Rows:
    """Records of two columns, in batches of two."""

    def records(self) -> list[dict[str, Any]]:
        return [{"id": n, "name": f"näme {n}" if n % 3 else None} for n in range(12)]

    def batches(self, records: Sequence[Any]) -> list[Batch]:
        pairs = [list(records[at : at + 2]) for at in range(0, len(records), 2)]
        return [ColumnBatch(pa.RecordBatch.from_pylist(pair, schema=SCHEMA)) for pair in pairs]


class Adjustable:
    """A source that ends unless `stop` is None, and whose other arguments may differ, too."""

    def source(self, place: Any, **options: Any) -> Source:
        raise NotImplementedError

    def live(self, place: Any) -> Source:
        return self.source(place, stop=None)

    def tolerant(self, place: Any, on_bad_record: str) -> Source:
        return self.source(place, on_bad_record=on_bad_record)


class Proxied:
    """A case whose connectors connect to `port`, which is that of a proxy in the block of `cutting`."""

    port: int

    @contextmanager
    def cutting(self) -> Iterator[CuttingProxy]:
        own = self.port
        with CuttingProxy(own) as proxy:
            self.port = proxy.port
            try:
                yield proxy
            finally:
                self.port = own


class Directory:
    """A directory of its own for each check."""

    @contextmanager
    def place(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)


class FileSource(Rows, Directory, SourceCase):
    """Files of one format, each `put` a file of its own."""

    format: ClassVar[str]
    features = frozenset({Feature.MISTAKES, Feature.CONNECTS})

    def put(self, place: Path, records: Sequence[Any]) -> None:
        if records:
            self.write(place / f"{next(_numbers):06}.{self.format}", records)

    def write(self, path: Path, records: Sequence[Any]) -> None:
        raise NotImplementedError

    def source(self, place: Path) -> Source:
        return self.files(place)

    def files(self, place: Path, **options: Any) -> Source:
        if not any(place.iterdir()):
            self.write(place / f"empty.{self.format}", [])
        given = {"schema": SCHEMA, "batch_rows": 1, **options}
        return files_source(str(place), format=self.format, **given)

    def mistakes(self, place: Path) -> Mapping[str, tuple[Source, str]]:
        nowhere = files_source(str(place / "no"), format=self.format, schema=SCHEMA)
        return {"a directory that does not exist": (nowhere, str(place / "no"))}


class TextSource(FileSource):
    features = frozenset({Feature.MISTAKES, Feature.CONNECTS, Feature.BAD_RECORDS})

    def source(self, place: Path) -> Source:
        return self.files(place, split_bytes="50b")

    def put_bad(self, place: Path) -> None:
        (place / f"{next(_numbers):06}.{self.format}").write_text("id,name\nnone,none\n")

    def tolerant(self, place: Path, on_bad_record: str) -> Source:
        return self.files(place, on_bad_record=on_bad_record)


class CsvSource(TextSource):
    format = "csv"

    def write(self, path: Path, records: Sequence[Any]) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "name"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)


class JsonSource(TextSource):
    format = "json"

    def write(self, path: Path, records: Sequence[Any]) -> None:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    def put_bad(self, place: Path) -> None:
        (place / f"{next(_numbers):06}.json").write_text("{no JSON}\n")


class Line:
    """Records of one text each."""

    def records(self) -> list[dict[str, Any]]:
        return [{"line": f"line {n}, ä"} for n in range(12)]

    def batches(self, records: Sequence[Any]) -> list[Batch]:
        pairs = [list(records[at : at + 2]) for at in range(0, len(records), 2)]
        return [ColumnBatch(pa.RecordBatch.from_pylist(pair)) for pair in pairs]


class LinesSource(Line, TextSource):
    format = "text"

    def files(self, place: Path, **options: Any) -> Source:
        return super().files(place, schema=None, **options)

    def write(self, path: Path, records: Sequence[Any]) -> None:
        path.write_text("".join(f"{record['line']}\n" for record in records))

    def put_bad(self, place: Path) -> None:
        (place / f"{next(_numbers):06}.text").write_bytes(b"\xff\n")

    def mistakes(self, place: Path) -> Mapping[str, tuple[Source, str]]:
        nowhere = files_source(str(place / "no"), format="text")
        return {"a directory that does not exist": (nowhere, str(place / "no"))}


class ParquetSource(FileSource):
    format = "parquet"

    def write(self, path: Path, records: Sequence[Any]) -> None:
        table = pa.Table.from_pylist(list(records), schema=SCHEMA)
        pq.write_table(table, path, row_group_size=5)


class ListSource(Rows, SourceCase):
    """Records in the memory of the process that writes the job."""

    features = frozenset({Feature.LAG})

    @contextmanager
    def place(self) -> Iterator[list[Any]]:
        yield []

    def put(self, place: list[Any], records: Sequence[Any]) -> None:
        place.extend(records)

    def source(self, place: list[Any]) -> Source:
        return from_list(place, schema=SCHEMA, batch_rows=1)


class FileSinkCase(Rows, Directory, SinkCase):
    format: ClassVar[str]
    features = frozenset(
        {Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE, Feature.PENDING, Feature.CONNECTS}
    )

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        return files_sink(str(place), format=self.format, guarantee=guarantee)

    def visible(self, place: Path) -> list[Any]:
        files = sorted(place.glob(f"[!.]*.{self.format}"))
        return [record for file in files for record in self.read(file)]

    def read(self, file: Path) -> list[Any]:
        raise NotImplementedError

    def pending(self, place: Path) -> Sequence[Any]:
        return [path for path in place.rglob("*") if path.is_file() and path.parent != place]


class CsvSink(FileSinkCase):
    format = "csv"

    def read(self, file: Path) -> list[Any]:
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        return [{"id": int(row["id"]), "name": row["name"] or None} for row in rows]


class JsonSink(FileSinkCase):
    format = "json"

    def read(self, file: Path) -> list[Any]:
        return [json.loads(line) for line in file.read_text().splitlines()]


class LinesSink(Line, FileSinkCase):
    format = "text"

    def read(self, file: Path) -> list[Any]:
        return [{"line": line} for line in file.read_text().splitlines()]


class ParquetSink(FileSinkCase):
    format = "parquet"

    def read(self, file: Path) -> list[Any]:
        return list(pq.read_table(file).to_pylist())


class CollectSink(Directory, SinkCase):
    """`collect` with a directory, of Python objects."""

    features = frozenset({Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE})

    def records(self) -> list[Any]:
        return [(n, f"name {n}") for n in range(12)]

    def batches(self, records: Sequence[Any]) -> list[Batch]:
        return [ObjectBatch(list(records[at : at + 2])) for at in range(0, len(records), 2)]

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        return collect(path=str(place / "rows"), guarantee=guarantee)

    def visible(self, place: Path) -> list[Any]:
        return list(collect(path=str(place / "rows"), guarantee="exactly_once").rows)


class WriteAhead(Rows, Directory, SinkCase):
    """A function that writes a file for each call, under the identity of its records."""

    features = frozenset({Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE})

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        def write(records: list[Any], epoch: Epoch) -> None:
            draft = place / f".{epoch.id}-{os.getpid()}-{threading.get_ident()}"
            draft.write_text(json.dumps([[each.id, each.name] for each in records]))
            draft.rename(place / f"{epoch.id}.json")

        return write_ahead_sink(write, guarantee=guarantee, rows=1)

    def visible(self, place: Path) -> list[Any]:
        files = [json.loads(file.read_text()) for file in sorted(place.glob("[!.]*.json"))]
        return [{"id": id_, "name": name} for records in files for id_, name in records]


class AsyncFunction(Rows, Directory, SinkCase):
    """An `async def` function of some records at a time."""

    features = frozenset({Feature.AT_LEAST_ONCE})

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        async def write(records: list[Any]) -> None:
            await asyncio.sleep(0)
            with (place / "lines").open("a") as file:
                file.writelines(json.dumps([each.id, each.name]) + "\n" for each in records)

        return function_sink(write, guarantee=guarantee, rows=3, max_in_flight=2)

    def visible(self, place: Path) -> list[Any]:
        file = place / "lines"
        lines = file.read_text().splitlines() if file.exists() else []
        return [dict(zip(["id", "name"], json.loads(line), strict=True)) for line in lines]


FILES_AND_MEMORY: dict[str, type[Case]] = {
    "csv_source": CsvSource,
    "json_source": JsonSource,
    "parquet_source": ParquetSource,
    "files_source (text)": LinesSource,
    "from_list": ListSource,
    "csv_sink": CsvSink,
    "json_sink": JsonSink,
    "parquet_sink": ParquetSink,
    "files_sink (text)": LinesSink,
    "collect": CollectSink,
    "function_sink": AsyncFunction,
    "write_ahead_sink": WriteAhead,
}
