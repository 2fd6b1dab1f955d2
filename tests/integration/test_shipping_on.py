"""Code that came by value is sent by value: the coordinator ships the job it was shipped."""

from __future__ import annotations

import pickle
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import cloudpickle
import msgspec
import pytest

from headgate.runtime.shipping import ship, unship

MODULE = """
import msgspec

class Price(msgspec.Struct, frozen=True):
    cents: int

    @property
    def euros(self):
        return self.cents / 100

def price(n):
    return Price(cents=n)
"""


def test_a_struct_of_a_module_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_over_there.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_over_there  # type: ignore[import-not-found]

    once = ship(only_over_there.price)
    monkeypatch.delitem(sys.modules, "only_over_there")
    monkeypatch.undo()
    twice = ship(unship(once))
    record = unship(twice)(250)
    assert record.euros == 2.5
    # Records travel between workers and into state though nothing can import their class.
    for dumps in (pickle.dumps, cloudpickle.dumps):
        assert pickle.loads(dumps([record, record])) == [record, record]


def test_annotations_that_only_their_module_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "says_it_later.py").write_text(
        "from __future__ import annotations\n"
        "from datetime import datetime as moment\n"
        "import msgspec\n"
        "class Visit(msgspec.Struct):\n"
        "    at: moment\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import says_it_later  # type: ignore[import-not-found]

    shipped = ship(says_it_later.Visit)
    monkeypatch.undo()
    del sys.modules["says_it_later"]
    visit = msgspec.convert({"at": "2026-01-01T00:00:00Z"}, unship(shipped))
    assert visit.at.year == 2026


def test_a_struct_made_in_a_function() -> None:
    class Local(msgspec.Struct):
        n: int = 3

        def double(self) -> int:
            return 2 * self.n

    assert unship(ship(Local))(4).double() == 8
    assert unship(ship(lambda n: Local(n)))(5).double() == 10


def test_annotations_of_types_travel() -> None:
    naive = Annotated[datetime, msgspec.Meta(tz=False, title="local time")]

    visit = msgspec.defstruct("Visit", [("at", naive)])
    assert unship(ship(naive)) == naive
    made = unship(ship(visit))(datetime(2024, 2, 29))
    assert made.at.tzinfo is None
