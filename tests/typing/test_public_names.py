"""Names that a user finds by asking Python, and arguments that are named one by one."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate import connectors

AGGREGATES = {"agg"}
"""Methods whose keyword arguments are the user's own names."""


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    for home in (hg, connectors, hg.triggers, hg.evictors):
        for name in getattr(home, "__all__", dir(home)):
            found = getattr(home, name)
            ours = str(getattr(found, "__module__", "")).startswith("headgate.")
            if name.startswith("_") or not callable(found) or not ours:
                continue
            yield f"{home.__name__}.{name}", found
            if inspect.isclass(found):
                for method, function in inspect.getmembers(found, inspect.isfunction):
                    if not method.startswith("_"):
                        yield f"{home.__name__}.{name}.{method}", function


def test_arguments_have_names() -> None:
    """A misspelt argument is then found by a type checker, and by the call itself."""
    nameless = [
        name
        for name, function in public()
        if not inspect.isclass(function) and name.rpartition(".")[2] not in AGGREGATES
        for each in inspect.signature(function).parameters.values()
        if each.kind is each.VAR_KEYWORD
    ]
    assert nameless == []


def test_all_ways_to_run_a_job_take_the_arguments_of_run() -> None:
    def how(function: Callable[..., Any]) -> dict[str, object]:
        found = inspect.signature(function).parameters.values()
        return {
            p.name: p.default for p in found if p.name not in ("self", "job", "cluster", "log_file")
        }

    assert how(hg.Job.run) == how(hg.Job.run_async) == how(hg.Job.start) == how(hg.submit)
    with pytest.raises(TypeError, match="if_exits"):
        hg.Job("x").start(if_exits="append")


def test_only_what_is_for_users_is_listed() -> None:
    assert dir(connectors) == sorted(connectors.__all__)
    assert dir(hg) == sorted(hg.__all__)
    public = (
        "checkpoint explain labels max_parallelism name options parallelism read resources restart run "
        "run_async start validate"
    )
    assert [name for name in dir(hg.Job("x")) if not name.startswith("_")] == public.split()


def test_every_name_is_there() -> None:
    for home in (hg, connectors):
        for name in dir(home):
            assert getattr(home, name) is not None, name


def test_connectors_that_are_not_used_are_not_loaded() -> None:
    script = """
import sys
from headgate.connectors import blackhole, generator, parquet_source
others = ("headgate.connectors.kafka", "headgate.connectors.formats.avro", "yaml")
print([name for name in sys.modules if name.startswith(others)])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_small_job_loads_no_module_that_takes_long_and_that_it_does_not_use() -> None:
    script = """
import sys
import headgate as hg
from headgate.connectors import collect, from_list
rows = collect(guarantee="none")
job = hg.Job("small")
job.read(from_list([1, 2, 3]), name="in").map(lambda x: 2 * x, name="double").write(rows, name="out")
job.run()
assert sorted(rows.rows) == [2, 4, 6]
packages = {"aiohttp", "email", "polars", "prometheus_client", "ray", "yaml"}
modules = {"http.server", "importlib.metadata", "pyarrow.compute", "pyarrow.fs", "pyarrow.parquet"}
print([name for name in sys.modules if name.partition(".")[0] in packages or name in modules])
steps = ("aggregation", "async_calls", "joins", "loops", "patterns", "process", "windows")
ours = tuple(f"headgate.operators.{step}" for step in steps) + (
    "headgate.api.keyed_stream",
    "headgate.state.aggregates",
    "headgate.state.rocksdb",
    "headgate.state.runs",
    "headgate.state.slots",
)
print([name for name in sys.modules if name.startswith(ours)])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["[]", "[]"]


@pytest.mark.parametrize(("given", "used"), [({}, "20"), ({"OPENBLAS_THREAD_TIMEOUT": "4"}, "4")])
def test_threads_of_numpy_that_have_no_work_soon_sleep(given: dict[str, str], used: str) -> None:
    """OpenBLAS reads it when NumPy is imported, and a value of the user's own stays."""
    script = """
import sys, headgate, os
assert "numpy" not in sys.modules
print(os.environ["OPENBLAS_THREAD_TIMEOUT"])
"""
    theirs = {name: os.environ[name] for name in os.environ if not name.startswith("OPENBLAS")}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**theirs, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == used


def test_type_checkers_find_what_python_finds() -> None:
    """They read imports that never run; Python reads the tables above them."""
    found = {name: getattr(hg, name) for name in dir(hg) if name != "__version__"}
    imports = [
        node
        for block in ast.parse(Path(hg.__file__).read_text()).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    ]
    typed = {
        alias.asname: getattr(
            importlib.import_module(f".{node.module or ''}", "headgate"), alias.name
        )
        for node in imports
        for alias in node.names
    }
    assert typed == found
