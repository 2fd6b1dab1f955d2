"""`hybrid` in a manifest: the source it makes, and each mistake at its line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import open_reader

TEXT = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: past-and-present}}
spec:
  sources:
    ticks:
      hybrid:
        {hybrid}
      {beside}
  sinks:
    out: {{from: ticks, blackhole: {{}}}}
"""
PAST = "history: {generator: {fields: {id: sequence}, rows: 5}}"
LIVE = "live: {generator: {fields: {id: {kind: sequence, start: 5}}}}"
CODE = """
from headgate.connectors import generator, sequence

asked = []

def ticks_after(end_ms):
    asked.append(end_ms)
    return generator({"at": sequence(end_ms + 1)}, splits=1)
"""


@pytest.fixture
def live_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "live_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("live_code", None)


def test_two_sources_in_a_row() -> None:
    job = load_job(TEXT.format(hybrid=f"{PAST}\n        {LIVE}", beside="parallelism: 2"), env={})
    (node,) = runnable(job).graph.sources()
    assert node.source is not None
    assert node.source.has_history
    assert not node.source.bounded
    assert node.detail.count("generator(") == 2


def test_a_live_source_from_a_function(live_code: None, tmp_path: Path) -> None:
    (tmp_path / "past.csv").write_text("at\n10\n30\n20\n")
    hybrid = (
        f"history: {{csv: {{path: {tmp_path}/past.csv}}}}\n"
        "        liveFunction: live_code:ticks_after\n"
        "        timeColumn: at"
    )
    job = load_job(TEXT.format(hybrid=hybrid, beside="schema: {at: long}"), env={})
    (node,) = runnable(job).graph.sources()
    assert node.source is not None
    assert len(node.source.splits(1)) == 2
    import live_code as module

    assert module.asked == [30]
    assert open_reader(node.source, node.source.splits(1)).snapshot() == node.source.splits(1)


MISTAKES = [
    (PAST, "", "7: hybrid needs either live or liveFunction"),
    (f"{LIVE}", "", "7: hybrid has no history"),
    (f"{PAST}\n        {LIVE}\n        liveFunction: a:b", "", "7: hybrid needs either live or"),
    (f"history: {{}}\n        {LIVE}", "", "7: history needs exactly one source found=``"),
    (
        f"history: {{generator: {{fields: {{id: sequence}}}}}}\n        {LIVE}",
        "",
        "7: the history has no end, so the live source would never begin",
    ),
    (
        f"{PAST}\n        live: {{generator: {{fields: {{id: sequence, at: timestamp}}}}}}",
        "",
        "7: history and live source have different columns",
    ),
    (f"{PAST}\n        live: {{generator: {{rows: many}}}}", "", "9: rows must be a whole number"),
    (f"{PAST}\n        live: {{genrator: {{}}}}", "", "9: unknown field in live field=`genrator`"),
    (f"history: {{csv: {{path: a.csv}}}}\n        {LIVE}", "", "7: history has no schema"),
    (
        f"history: {{nexmark: {{events: 5}}}}\n        {LIVE}",
        "schema: {id: long}",
        "7: history and live source have different columns",
    ),
    (f"{PAST}\n        liveFunction: a:b", "", "7: module cannot be imported"),
    (
        f"{PAST}\n        {LIVE}\n        timeColumn: id",
        "",
        "7: the end of the history is not asked for",
    ),
    (f"history: {{hybrid: {{}}}}\n        {LIVE}", "", "8: unknown field in history field=`hybr"),
]


@pytest.mark.parametrize(("hybrid", "beside", "wanted"), MISTAKES)
def test_mistakes_are_at_their_lines(
    hybrid: str, beside: str, wanted: str, problems_of: Callable[..., list[str]]
) -> None:
    found = problems_of(TEXT.format(hybrid=hybrid, beside=beside))
    assert found[0].startswith(wanted), found
