"""The service for standing queries, killed at random: its results are those of a loop over all events."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
RBEA = Path(__file__).resolve().parents[2] / "examples" / "rbea"
EVENTS, USERS = 20_000, 100


@pytest.fixture
def rbea(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the example, reading and writing below the test's directory."""
    for name in ("RESULTS", "BROKEN", "CHECKPOINTS"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("QUERIES", str(tmp_path / "queries.jsonl"))
    monkeypatch.setenv("EVENTS", str(EVENTS))
    monkeypatch.setenv("EVENTS_PER_SECOND", "3000")
    monkeypatch.setenv("USERS", str(USERS))
    monkeypatch.syspath_prepend(str(RBEA.parent))
    monkeypatch.syspath_prepend(str(RBEA))
    names = ("query_file", "rbea", "answer", "demo", "run")
    modules = {name: importlib.import_module(name) for name in names}
    yield modules
    for name in names:
        sys.modules.pop(name, None)


def test_standing_queries_survive_kills(
    rbea: Any, ring: Any, kills: Any, killings: Any, tmp_path: Path
) -> None:
    run, queries = rbea["run"], tmp_path / "queries.jsonl"
    for share, message in run.PLAN:
        run.write(queries, {"at": int(share * EVENTS) * rbea["rbea"].EVERY_MS, **message})
    run.write(queries, {"end": True})
    plan = kills(workers=3, coordinators=1)
    ran = ring.run(rbea["rbea"].make_job(), plan, seed=4, until=killings(4))
    assert len(ran.chaos.kills) == 4, ran.chaos.kills
    results, failures = rbea["answer"].answer(
        rbea["query_file"].read_messages(queries.read_text().splitlines()), EVENTS, USERS
    )
    assert results
    assert failures
    assert sorted(run.rows(tmp_path / "results", rbea["rbea"].Result), key=repr) == results
    assert sorted(run.rows(tmp_path / "broken", rbea["rbea"].Failure), key=repr) == failures
