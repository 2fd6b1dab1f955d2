"""The demo ends, whatever the job does, and does not mix the results of two runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headgate.tests.support.modules import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def demo():
    return load(EXAMPLES / "demo.py")


def job(code):
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code], stderr=subprocess.PIPE, text=True, bufsize=1
    )


def test_it_gives_up_on_a_job_that_hangs_with_its_log_open(demo, monkeypatch, capsys):
    monkeypatch.setattr(demo, "GIVE_UP_S", 1)
    hanging = job("import signal; signal.pause()")
    demo.Watch(hanging)
    assert not demo.ended_well(hanging)
    assert hanging.poll() is not None
    assert "did not end within 1 s" in capsys.readouterr().out


def test_it_reads_the_log_and_kills_once(demo, monkeypatch):
    kills = []
    monkeypatch.setattr(demo, "kill_a_worker", lambda name: kills.append(1) or True)
    lines = [f"checkpoint {n} completed" for n in (1, 2, 3)] + ["restored checkpoint 3"]
    running = job(f"import sys; print({chr(10).join(lines)!r}, file=sys.stderr)")
    watch = demo.Watch(running)
    assert demo.ended_well(running)
    watch.join(30)
    assert (kills, watch.killed, watch.restored) == ([1], True, 3)


def test_a_job_that_fails_is_a_failure(demo):
    assert not demo.ended_well(job("raise SystemExit(3)"))


def test_kept_results_are_not_added_to(demo, monkeypatch, tmp_path, capsys):
    (tmp_path / "delays").mkdir()
    monkeypatch.setattr(sys, "argv", ["demo.py", "--keep", str(tmp_path)])
    monkeypatch.setattr(demo, "demo", lambda work: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        demo.main()
    assert "results of an earlier run" in capsys.readouterr().err


def test_the_flights_are_written_where_the_jobs_look_for_them():
    text = (EXAMPLES / "flights.yaml").read_text() + (EXAMPLES / "flights.py").read_text()
    assert text.count("examples/data/flights.parquet") == 2
    made = (EXAMPLES / "make_flights.py").read_text()
    assert 'DATA = Path("examples/data")' in made
