"""The output of `python job.py` when it fails: one clear message, and the user's own traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.errors import StateError, UserCodeError, UserTraceback
from headgate.tests.support.commands import ended_with

HEAD = """
import headgate as hg
from headgate.connectors import blackhole, from_list

def share(n):
    return 12 // n

def shares(n):
    return share(n)

job = hg.Job("shares")
numbers = job.read(from_list([1, 0]), name="in")
"""
TAIL = """
if __name__ == "__main__":
    job.run()
"""
ENDS_BADLY = {
    "map": "numbers.map(shares, name='share').write(blackhole(), name='out')",
    "async map": """
async def waits(n):
    return shares(n)
numbers.map(waits, name='share').write(blackhole(), name='out')""",
    "map_async": """
async def waits(n):
    return shares(n)
numbers.map_async(waits, name='share').write(blackhole(), name='out')""",
    "process": """
class Shares(hg.KeyedProcess):
    def on_record(self, record, ctx):
        yield shares(record)
numbers.key_with(lambda n: n).process(Shares(), name='share').write(blackhole(), name='out')""",
}


def run(path: Path, text: str) -> list[str]:
    path.write_text(text)
    command = [sys.executable, "-W", "ignore", str(path)]
    ran = subprocess.run(command, cwd=path.parent, capture_output=True, text=True)
    ended_with(ran, 1)
    return ran.stderr.splitlines()


def files(lines: list[str]) -> list[str]:
    return [Path(line.split('"')[1]).name for line in lines if line.startswith('  File "')]


@pytest.mark.parametrize("name", ENDS_BADLY)
def test_what_a_function_raised_comes_with_the_users_traceback(name: str, tmp_path: Path) -> None:
    lines = run(tmp_path / "shares.py", HEAD + ENDS_BADLY[name] + TAIL)
    assert "ZeroDivisionError: integer division or modulo by zero" in lines
    assert any(
        line.startswith("headgate.errors.UserCodeError: the function of `share` raised")
        for line in lines
    )
    # The only frame of headgate itself is the one that raises, in `Job.run`.
    assert [file for file in files(lines) if file != "shares.py"] == ["job.py"]
    assert len(lines) < 30


def test_a_job_that_cannot_run_is_a_message_and_no_tour(tmp_path: Path) -> None:
    lines = run(tmp_path / "shares.py", HEAD + "numbers.map(shares)" + TAIL)
    assert "headgate.errors.PlanError: job `shares` writes nothing" in lines
    assert files(lines) == ["shares.py", "job.py"]


@pytest.mark.parametrize("cluster", ["in-process", pytest.param("local", marks=pytest.mark.ray)])
def test_the_cause_is_the_users_traceback(cluster: str) -> None:
    """Also if the job ends in another process, which tells the end as data."""

    def fails(n: int) -> int:
        raise ValueError(f"no {n}")

    job = hg.Job("fails")
    job.read(from_list([1]), name="in").map(fails, name="step").write(blackhole(), name="out")
    with pytest.raises(UserCodeError) as failed:
        job.run(cluster=cluster)
    cause = failed.value.__cause__
    assert isinstance(cause, UserTraceback)
    assert "in fails" in str(cause)
    assert "ValueError: no 1" in str(cause)
    assert "per_record.py" not in str(cause)


def test_errors_that_are_not_of_a_function_keep_their_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def launch(*arguments: object, **named: object) -> object:
        raise StateError("it does not fit") from KeyError("n")

    monkeypatch.setattr("headgate.runtime.cluster.launch.launch", launch)
    job = hg.Job("fails")
    job.read(from_list([1]), name="in").write(blackhole(), name="out")
    with pytest.raises(StateError) as failed:
        job.run()
    assert isinstance(failed.value.__cause__, KeyError)
