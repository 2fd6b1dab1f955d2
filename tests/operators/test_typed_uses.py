"""Wrong uses of the API do not pass a type checker; right ones do, with the types one expects."""

from __future__ import annotations

import os
import re

import pytest

SOURCE = """
import msgspec

from headgate.operators.aggregates import count
from headgate.operators.job_graph import JobGraph
from headgate.operators.sink import Sink
from headgate.operators.source import Source
from headgate.operators.stream import Stream
from headgate.operators.windows import tumbling


class Url(msgspec.Struct):
    url: str
    n: int


async def later(record: Url) -> int:
    return record.n


def right(job: JobGraph, source: Source, sink: Sink) -> None:
    read = job.read(source, name="x").event_time("ts", max_out_of_order="1s")
    urls: Stream[Url] = read.map(lambda r: r, into=Url)
    texts: Stream[str] = urls.map(lambda r: r.url)
    numbers: Stream[int] = urls.map(later)
    united: Stream[str] = texts.filter(lambda t: t > "a").union(texts).rebalance()
    flat: Stream[str] = urls.flat_map(lambda r: [r.url])
    last: Stream[Url] = urls.key_by("url").reduce(lambda a, b: b, name="r")
    counted = urls.key_by("url").window(tumbling("1m")).agg(n=count(), name="w", into=Url)
    counted.late.write(sink, name="late")
    urls.key_with(lambda r: r.url).reduce(lambda a, b: a, name="m")


def wrong(job: JobGraph, source: Source, sink: Sink, numbers: Stream[int]) -> None:
    job.read(source)  # wrong
    job.read(3, name="x")  # wrong
    numbers.write(sink)  # wrong
    numbers.write("x", name="y")  # wrong
    numbers.event_time("ts", max_out_of_order=10)  # wrong
    numbers.key_by("x").agg(n=count())  # wrong
    numbers.key_by("x").agg(n="count()", name="q")  # wrong
    numbers.key_by("x").reduce(lambda a: a, name="r")  # wrong
    numbers.map(lambda x: x.nope)  # wrong
    texts: Stream[str] = numbers.map(lambda x: x + 1)  # wrong
    numbers.filter(3)  # wrong
    numbers.window("1m")  # wrong
    job.checkpoint(every=10, storage="dir")  # wrong
"""


def test_wrong_uses_are_type_errors(tmp_path, request, monkeypatch):
    api = pytest.importorskip("mypy.api")
    root = request.config.rootpath
    # The package is the repository itself: mypy needs a directory that has it under its name.
    link = root / ".cache" / "src" / "headgate"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(os.path.join("..", ".."))
    monkeypatch.chdir(root)
    monkeypatch.setenv("MYPYPATH", str(link.parent))
    path = tmp_path / "uses.py"
    path.write_text(SOURCE)
    output, _, _ = api.run(["--strict", str(path)])
    found = {int(line) for line in re.findall(r"uses\.py:(\d+): error", output)}
    lines = SOURCE.splitlines()
    assert found == {number for number, text in enumerate(lines, 1) if text.endswith("# wrong")}, (
        output
    )
