"""A user's script and a module beside it run on a local Ray whose workers cannot import either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.tests.support.commands import ended_with

pytestmark = [pytest.mark.ray]

SIBLING = """
import msgspec

class Price(msgspec.Struct, frozen=True):
    item: str
    cents: int

    @property
    def euros(self) -> float:
        return self.cents / 100

FACTOR = 3

def scale(n: int) -> int:
    return n * FACTOR
"""

SCRIPT = """
import sys
import msgspec
import headgate as hg
from headgate.connectors import collect, json_sink, numbers
from sibling import Price, scale

class Line(msgspec.Struct):
    item: str
    euros: float
    n: int = 0

    def twice(self) -> float:
        return 2 * self.euros

OFFSET = 1

def price(n: int) -> Price:
    return Price(item=f"item-{n % 3}", cents=scale(n) + OFFSET)

def line(p: Price) -> Line:
    return Line(p.item, p.euros, n=p.cents)

if __name__ == "__main__":
    job = hg.Job("shipped", parallelism=2)
    job.checkpoint(every="200ms", storage=sys.argv[1] + "/chk")
    (
        job.read(numbers(300, rate=600, batch_rows=10), name="numbers")
        .map(price)
        .rebalance()
        .map(line, into=Line)
        .map(lambda row: Line(row.item, row.twice() if hasattr(row, "twice") else 2 * row.euros, row.n),
             into=Line)
        .write(json_sink(sys.argv[1] + "/out", guarantee="exactly_once"), name="out")
    )
    print(job.run(cluster="local").status)
"""


def test_a_script_and_its_sibling(tmp_path: Path) -> None:
    import pyarrow.dataset as ds

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sibling.py").write_text(SIBLING)
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        cwd=tmp_path / "elsewhere",
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    ended_with(ended, 0)
    assert ended.stdout.split()[-1] == "FINISHED"
    assert "(raylet)" not in ended.stderr
    rows = ds.dataset(tmp_path / "out", format="json").to_table().to_pylist()
    assert sorted((r["item"], r["n"], r["euros"]) for r in rows) == sorted(
        (f"item-{n % 3}", 3 * n + 1, 2 * ((3 * n + 1) / 100)) for n in range(300)
    )
