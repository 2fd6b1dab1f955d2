"""Nexmark's runner comes to its end, with a row and figures for each query."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate

BENCHMARKS = Path(headgate.__file__).parent / "benchmarks"
HOST = "print('{}', flush=True)\nfor line in open(0): print('{\"heard\": 1}', flush=True)\n"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import nexmark_run

    yield nexmark_run
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(BENCHMARKS):
            del sys.modules[name]


def test_an_engine_that_has_ended_starts_again(runner: Any, tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text(HOST)
    engine = runner.Engine([sys.executable, str(script)], tmp_path / "log")
    first = engine.host()
    assert engine.host() is first
    first.close()
    assert engine.host().ask({}) == {"heard": 1}
    engine.close()


def test_the_sum_of_nulls_is_compared_too(runner: Any) -> None:
    assert runner.same_sum(None, None)
    assert not runner.same_sum(None, 0.0)
    assert not runner.same_sum(0.0, None)
    assert runner.same_sum(1e12, 1e12 + 1)
    assert not runner.same_sum(1.0, 2.0)


def test_main_reports_each_query_without_flink(
    runner: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = tmp_path / "figures.json"
    options = ["--queries", "q2,q3", "--rounds", "1", "--millions", "0.05"]
    options += ["--cluster", "in-process", "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["nexmark_run.py", *options])
    monkeypatch.setattr(runner, "find_flink", lambda *_: None)
    runner.main()
    printed = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in printed] == ["| q2", "| q3"]
    assert [run["query"] for run in json.loads(figures.read_text())] == ["q2", "q3"]
