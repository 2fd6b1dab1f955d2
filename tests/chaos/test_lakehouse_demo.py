"""The demo from PostgreSQL to Iceberg (examples/lakehouse_demo.py): its verdict, and the jobs."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headgate.tests.support.commands import output_of_demo
from headgate.tests.support.modules import load
from headgate.tests.support.skips import thorough_only

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def demo() -> Any:
    return load(EXAMPLES / "lakehouse_demo.py")


def test_the_verdict_counts_what_is_lost_doubled_and_wrong(
    demo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    history = [
        ("snapshot", 1, 1, "new", 100),
        ("snapshot", 2, 2, "new", 200),
        ("update", 1, 3, "paid", 100),
        ("delete", 2, 2, "new", 200),
    ]
    table = [("", 1, 3, "paid", 100)]
    wrong = ("update", 1, 3, "sent", 100)
    right = "lost: 0, doubled: 0, wrong: 0"
    for found, expected in (
        (history, right),
        (history[::-1], right),
        (history[1:], "lost: 1, doubled: 0, wrong: 0"),
        ([*history, history[0]], "lost: 0, doubled: 1, wrong: 0"),
        ([*history[:2], wrong, history[3]], "lost: 1, doubled: 0, wrong: 3"),
        (history[:3], "lost: 1, doubled: 0, wrong: 1"),
    ):
        assert demo.compare(found, history, table) == (expected == right)
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(3))
def test_every_schedule_kills_everything(demo: Any, seed: int) -> None:
    planned = demo.schedule(12, seed)
    assert planned == demo.schedule(12, seed)
    assert planned != demo.schedule(12, seed + 1)
    assert Counter(kind for kind, _ in planned) == dict.fromkeys(demo.KINDS, 3)


@pytest.mark.chaos
@pytest.mark.server
def test_kills_of_jobs_and_servers_change_no_result(tmp_path: Path) -> None:
    """Four kills: both jobs, the broker and the database."""
    thorough_only()
    command = [sys.executable, str(EXAMPLES / "lakehouse_demo.py"), "--kills", "4"]
    output = output_of_demo([*command, "--changes", "1500", "--keep", str(tmp_path / "demo")])
    assert "==> EQUAL" in output
    assert "kill -9 4 of 4" in output
