"""Cuts read by a thread that is interrupted between any two steps by the mailbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate.errors import InternalError
from headgate.state.keyed.cuts import Changes, Cut


class Interrupted(dict[Any, Any]):
    """An undo log: the mailbox goes on as soon as the thread has looked into it."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile: Callable[[], None] | None = meanwhile

    def _interrupt(self) -> None:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        self._interrupt()
        return found

    def copy(self) -> dict[Any, Any]:
        copied = dict(self)
        self._interrupt()
        return copied


@pytest.mark.parametrize(
    "read",
    [
        lambda cut, live: cut.find(0, "a", live["a"]),
        lambda cut, live: (live.copy() | cut.overlay(0))["a"],
    ],
    ids=["one address", "a part"],
)
def test_a_newer_cut_that_opens_while_an_older_one_is_read(
    read: Callable[[Cut, dict[str, int]], int],
) -> None:
    changes, values = Changes(), {"a": 1}

    def write(value: int) -> None:
        changes.log(0, "a", values["a"])
        values["a"] = value

    def write_cut_and_write() -> None:
        write(2)
        changes.cut()
        write(3)

    cut = changes.cut()
    cut.undo[0] = Interrupted(write_cut_and_write)
    live = dict(values)  # what the thread read of the table before it was interrupted
    assert read(cut, live) == 1
    assert read(cut, values) == 1


def test_sets_that_are_joined_are_never_missing() -> None:
    """While the mailbox joins the two oldest sets of changes, a thread asks for them."""
    changes, seen = Changes(), []

    class Watched(set[Any]):
        def __or__(self, other: Any) -> Any:
            seen.append(set().union(*changes.changed(1, newest)))
            return set(self) | other

    changes.cut()
    changes.confirm(1)
    changes.dirty = Watched({"first"})
    for number in range(32):
        newest = changes.cut()
        changes.dirty.add(number)
    changes.cut()
    assert seen
    assert "first" in seen[0]
    assert "first" in set().union(*changes.changed(1, newest))


def test_a_cut_whose_set_was_joined_knows_its_changes() -> None:
    changes = Changes()
    changes.cut()
    changes.dirty.add("a")
    cut = changes.cut()
    for _ in range(40):
        changes.dirty.add("b")
        changes.cut()
    assert "a" in set().union(*changes.changed(1, cut))


def test_without_checkpoints_nothing_is_remembered_of_what_changed() -> None:
    """Keys that come and go would be remembered for ever: only a cut forgets them."""
    changes = Changes()
    changes.dirty.add("a")
    changes.dirty.update(["b", "c"])
    assert not changes.dirty
    changes.cut()
    changes.dirty.add("d")
    changes.dirty.update(["e"])
    second = changes.cut()
    assert set().union(*changes.changed(1, second)) == {"d", "e"}
    with pytest.raises(InternalError, match="known since `1`"):
        changes.changed(0, second)
