"""Files of plain lines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headgate.connectors import files_sink, files_source
from headgate.errors import DataError, PlanError, UsageError
from headgate.operators.elements import ColumnBatch
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import make_context, read_all


def read(path: Path, **options: Any) -> list[Any]:
    return asyncio.run(read_all(files_source(path, format="text", **options)))


@pytest.mark.parametrize("split_bytes", [1, 5, 1000])
def test_line_breaks_are_left_out_and_empty_lines_are_skipped(
    tmp_path: Path, split_bytes: int
) -> None:
    data = '\ufeffone\r\n\n  two \nä\r\r\n\r\n,"{three\tcolumns}\rx\n€'.encode()
    (tmp_path / "a.txt").write_bytes(data)
    lines = ["one", "  two ", "ä\r", ',"{three\tcolumns}\rx', "€"]
    assert read(tmp_path, split_bytes=split_bytes) == [{"line": line} for line in lines]
    assert read(tmp_path, schema={"text": "string"})[0] == {"text": "one"}


def test_columns_that_lines_do_not_have_are_refused(tmp_path: Path) -> None:
    for schema in ({"a": "string", "b": "string"}, {"a": "int64"}):
        with pytest.raises(UsageError, match="one column of texts"):
            files_source(tmp_path, format="text", schema=schema)
        sink = files_sink(tmp_path, format="text", guarantee="none")
        kinds = {"string": pa.string(), "int64": pa.int64()}
        with pytest.raises(PlanError):
            sink.bind(pa.schema([(name, kinds[kind]) for name, kind in schema.items()]))


@pytest.mark.parametrize("bad", [None, "", "a\nb", "a\r"])
def test_texts_that_would_not_be_read_back_fail(tmp_path: Path, bad: str | None) -> None:
    schema = pa.schema([("line", pa.string())])
    writer = files_sink(tmp_path / "out", format="text", guarantee="exactly_once").writer()
    writer.open(make_context())
    writer.prepare()
    data = pa.RecordBatch.from_pylist([{"line": "good"}, {"line": bad}], schema=schema)
    with pytest.raises(DataError, match="a text is no line"):
        writer.write(ColumnBatch(data))
    writer.close()


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: lines}}
spec:
  checkpoint: {{every: 1s, storage: {folder}/state}}
  sources:
    log: {{text: {{path: "{folder}/*.log", splitBytes: 4b}}}}
  sinks:
    out: {{from: log, text: {{path: {folder}/out}}, guarantee: exactly_once}}
"""


def test_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("one\ntwo\n")
    load_job(MANIFEST.format(folder=tmp_path)).run()
    found = [line for file in (tmp_path / "out").glob("*.text") for line in file.open()]
    assert sorted(found) == ["one\n", "two\n"]
