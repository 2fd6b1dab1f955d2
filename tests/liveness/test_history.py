"""The failures of a job, seen behind its end."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.errors import JobNotFound, OptionError
from headgate.runtime.cli.listing import history
from headgate.runtime.control import registry


def failing(text: str, **options: str) -> hg.Job:
    def broken(n: int) -> int:
        raise ValueError(text)

    job = hg.Job("ended", options=options)
    job.restart(attempts=1, delay="1ms")
    job.read(from_list([1]), name="in").map(broken, name="broken").write(blackhole(), name="out")
    return job


@pytest.fixture
def enrichers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def team(failure: dict[str, Any]) -> dict[str, str]:
        return {"team": "blue" if failure["category"] == "user" else "red"}

    def breaks(failure: dict[str, Any]) -> dict[str, str]:
        raise RuntimeError("no labels today")

    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "enrichers", SimpleNamespace(team=team, breaks=breaks))


def test_the_history_of_a_job_outlives_it(enrichers: None, capsys: Any) -> None:
    chosen = {"jobmanager.failure-enrichers": "enrichers:breaks, enrichers:team"}
    with pytest.raises(hg.errors.UserCodeError):
        failing("first", **chosen).run()
    history("ended", as_json=False, details=True)
    shown = capsys.readouterr().out
    assert shown.count("raised ValueError: first") == 2  # the failure, and that of its restart
    assert shown.count("(user_code)") == 2
    assert shown.count("team=`blue`") == 2
    assert "Traceback" in shown
    assert "-> the job failed: all restart attempts are used up" in shown
    # The next run that ends without failure has none to show.
    registry.leave_failures("ended", [])
    with pytest.raises(JobNotFound):
        history("ended", as_json=False, details=False)


def test_enrichers_that_are_not_there_are_refused(enrichers: None) -> None:
    with pytest.raises(OptionError, match="no such failure enricher"):
        failing("x", **{"jobmanager.failure-enrichers": "enrichers:nobody"}).run()


def test_the_failures_of_a_bounded_number_of_jobs_are_kept(enrichers: None) -> None:
    for number in range(registry.ENDED_MAX + 5):
        registry.leave_failures(f"job {number}", [{"text": "x"}])
    assert len(list(registry.run_dir().glob("ended-*.json"))) == registry.ENDED_MAX
