"""Objects that cannot be sent to workers are found before anything starts: step, variable, line, fix."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, from_list, function_sink
from headgate.errors import PlanError
from headgate.runtime.job import runnable
from headgate.tests.support.commands import ended_with


class Client:
    """As clients of HTTP do, it holds a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def get(self, n: int) -> int:
        with self._lock:
            return n


client = Client()
lock = threading.Lock()
connection = sqlite3.connect(":memory:")
settings = {"client": client}


def locked(n: int) -> int:
    with lock:
        return n


def selects(n: int) -> int:
    return int(connection.execute("select 1").fetchone()[0]) + n


def indirect(n: int) -> int:
    return selects(n)


def of_a_dict(n: int) -> int:
    return settings["client"].get(n)


def with_default(n: int, by: Client = client) -> int:
    return by.get(n)


def gets(n: int, by: Client) -> int:
    return by.get(n)


async def awaits(n: int) -> int:
    await asyncio.sleep(0)
    return client.get(n)


def closure() -> Callable[[int], int]:
    mine = Client()
    return lambda n: mine.get(n)


class Enriched:
    def __init__(self) -> None:
        self.client = client

    def __call__(self, n: int) -> int:
        return self.client.get(n)


class Processed(hg.KeyedProcess[int, int, int]):
    def on_record(self, record: int, ctx: hg.Context[int]) -> list[int]:
        return [client.get(record)]


def writes(n: int) -> None:
    client.get(n)


def mapped(function: Any) -> hg.Job:
    job = hg.Job("sends")
    stream = job.read(from_list([1, 2]), name="in")
    stream.map(function, name="step").write(collect(guarantee="none"), name="out")
    return job


def of_stream(add: Callable[[Any], Any]) -> hg.Job:
    job = hg.Job("sends")
    stream = add(job.read(from_list([1, 2]), name="in"))
    if stream is not None:
        stream.write(collect(guarantee="none"), name="out")
    return job


LOCK = "the global `lock` of `locked`", "with lock:"
CONNECTION = "the global `connection` of `selects`", "connection.execute"
Made = tuple[Callable[[], hg.Job], str, str]
JOBS: dict[str, Made] = {
    "a lock": (lambda: mapped(locked), *LOCK),
    "a connection": (lambda: mapped(selects), *CONNECTION),
    "what a function calls": (lambda: mapped(indirect), *CONNECTION),
    "in a dict": (
        lambda: mapped(of_a_dict),
        "the global `settings` of `of_a_dict`",
        'settings["client"]',
    ),
    "a default": (lambda: mapped(with_default), "the default of `by` of `with_default`", ""),
    "a partial": (
        lambda: mapped(partial(gets, by=client)),
        "the argument `by` of `partial(gets)`",
        "",
    ),
    "a closure": (
        lambda: mapped(closure()),
        "the variable `mine` of `closure.<locals>.<lambda>`",
        "mine.get",
    ),
    "an attribute": (lambda: mapped(Enriched()), "the attribute `client` of `Enriched`", ""),
    "a coroutine function": (
        lambda: mapped(awaits),
        "the global `client` of `awaits`",
        "client.get",
    ),
    "a filter": (lambda: of_stream(lambda s: s.filter(locked, name="step")), *LOCK),
    "a process function": (
        lambda: of_stream(lambda s: s.key_with(lambda n: n).process(Processed(), name="step")),
        "the global `client` of `Processed.on_record`",
        "client.get",
    ),
    "a partitioner": (
        lambda: of_stream(
            lambda s: s.partition_with(lambda n, p: locked(n) % p).map(abs, name="step")
        ),
        *LOCK,
    ),
    "a key": (lambda: of_stream(lambda s: s.key_with(locked).reduce(max, name="step")), *LOCK),
    "a sink": (
        lambda: of_stream(lambda s: s.write(function_sink(writes, guarantee="none"), name="step")),
        "the global `client` of `writes`",
        "client.get",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_it_is_found_before_anything_starts(name: str) -> None:
    make, what, line = JOBS[name]
    job = make()
    for ask in (job.validate, job.explain, runnable(job).spec, job.run):
        with pytest.raises(PlanError) as refused:
            ask()
        assert refused.value.message.startswith(
            f"step `step` cannot be sent to workers: {what} cannot be pickled (cannot pickle"
        )
        assert "hg.per_worker(" in refused.value.fix
        assert "open()" in refused.value.fix
        places = refused.value.where.split("\n  at ")
        assert line in places[0]
        assert all(place.split(":")[0].endswith("test_unshippable.py") for place in places)


def test_every_step_that_holds_something_is_named() -> None:
    job = hg.Job("two")
    stream = job.read(from_list([1]), name="in").map(locked, name="first")
    stream.map(selects, name="second").map(abs, name="third").write(
        collect(guarantee="none"), name="out"
    )
    assert [problem.message.split("`")[1] for problem in runnable(job).problems()] == [
        "first",
        "second",
    ]


def test_a_source_that_holds_something_without_a_name() -> None:
    job = hg.Job("listed")
    job.read(from_list([threading.Lock()]), name="locks").write(
        collect(guarantee="none"), name="out"
    )
    with pytest.raises(PlanError, match="step `locks` cannot be sent to workers"):
        job.validate()


def test_an_open_file_is_no_copy_of_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("some words")
    with path.open() as words:
        job = mapped(lambda n: words.read())
        with pytest.raises(PlanError, match="cannot pickle an open file: .*words.txt"):
            job.validate()


def test_the_command_line_says_it_in_a_few_lines(tmp_path: Path) -> None:
    (tmp_path / "locks.py").write_text(
        "import threading\n"
        "import headgate as hg\n"
        "from headgate.connectors import blackhole, from_list\n"
        "lock = threading.Lock()\n"
        "def add(n):\n"
        "    with lock:\n"
        "        return n + 1\n"
        "job = hg.Job('locks')\n"
        "job.read(from_list([1]), name='in').map(add, name='add').write(blackhole(), name='out')\n"
    )
    ran = subprocess.run(
        [str(Path(sys.executable).with_name("headgate")), "validate", "locks.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    ended_with(ran, 2)
    assert ran.stderr.splitlines()[1] == "  at locks.py:6  with lock:"
    assert len(ran.stderr.splitlines()) == 5
