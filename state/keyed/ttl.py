"""State that expires: the rules that a user gives, and tables that follow them.

An entry lives for `after` from its last use. Expired entries are removed when they are accessed, a few
more at each access, and in the background. Full snapshots leave them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import msgspec

from ...errors import PlanError
from .base import ABSENT, EntryTable, ValueTable

_LEAST = -(2**63)


@dataclass(frozen=True, slots=True)
class StateTtl:
    """The time that the values of a state live.

    Attributes:
        after: a duration such as `"1d"`, or a timedelta; at least 1 ms.
        update: what counts as a use: creating and writing, or also reading.
        expired: whether a value that has expired but has not been removed yet is still returned (once).
        time: with `processing` the clock of the machine counts. With `event` an entry is used at the
            event time of the current record, and expires when the watermark has advanced by `after`
            since.
        cleanup_per_access: how many other entries are checked for removal at each access.
        cleanup_per_second: how many entries are checked in the background each second, per subtask.
    """

    after: str | timedelta
    update: Literal["write", "read_and_write"] = "write"
    expired: Literal["never_return", "return_if_not_cleaned_up"] = "never_return"
    time: Literal["processing", "event"] = "processing"
    cleanup_per_access: int = 5
    cleanup_per_second: int = 1000

    def problem(self) -> str:
        """Return a description of what is wrong, empty if nothing is. The duration is checked when it is
        parsed.
        """
        for name, allowed in (
            ("update", ("write", "read_and_write")),
            ("expired", ("never_return", "return_if_not_cleaned_up")),
            ("time", ("processing", "event")),
        ):
            if (value := getattr(self, name)) not in allowed:
                return f"{name} must be one of {', '.join(allowed)} value=`{value}`"
        for name in ("cleanup_per_access", "cleanup_per_second"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                return f"{name} must be a whole number of at least 0 value=`{value}`"
        return ""


def ttl_of(ttl: object) -> StateTtl | None:
    """Return the rules that the argument `ttl` of a user gives; None if nothing expires.

    Raises:
        PlanError: it is neither a duration nor `StateTtl`, or a rule is wrong. The duration itself is
            checked when it is parsed.
    """
    rules = StateTtl(ttl) if isinstance(ttl, str | timedelta) else ttl
    if rules is None:
        return None
    if not isinstance(rules, StateTtl):
        raise PlanError(
            f"ttl must be a duration value=`{ttl!r}`",
            fix='such as ttl="1d", or hg.StateTtl(...)',
        )
    if problem := rules.problem():
        raise PlanError(f"ttl: {problem}")
    return rules


class TtlClock(Protocol):
    """A clock of one kind of time, ms. All functions are cheap."""

    def now(self) -> int:
        """Return the time by which entries of the current key expire."""
        ...

    def passed(self) -> int:
        """Return the time that has passed for all keys, which may be less than `now` for the
        current key.
        """
        ...

    def use(self) -> int:
        """Return the time of a use that happens now."""
        ...


class Expiry(msgspec.Struct, frozen=True):
    """The resolved rules of one state."""

    after_ms: int
    ttl: StateTtl
    clock: TtlClock

    def dead_until(self) -> int:
        """Return the time at or before which entries of the current key must last have been used to have
        expired.
        """
        return max(_LEAST, self.clock.now() - self.after_ms)

    def all_dead_until(self) -> int:
        """Return the same time for entries of any key."""
        return max(_LEAST, self.clock.passed() - self.after_ms)


class _Rules:
    """The decisions that both kinds of tables share."""

    def __init__(self, expiry: Expiry, sweep: Callable[[int, int], int]) -> None:
        self.dead_until, self._all_dead_until = expiry.dead_until, expiry.all_dead_until
        self._use = expiry.clock.use
        self._after_ms = expiry.after_ms
        self._on_read = expiry.ttl.update == "read_and_write"
        self._return_expired = expiry.ttl.expired == "return_if_not_cleaned_up"
        self._cleanup = expiry.ttl.cleanup_per_access
        self._sweep = sweep

    def clean(self) -> None:
        """Check a few entries, as every access does."""
        if self._cleanup:
            self._sweep(self._cleanup, self._all_dead_until())

    def read(self, pair: Any, remove: Callable[[], None], write: Callable[[Any], None]) -> Any:
        """Return the value of a pair in a table, or `ABSENT`; removes or renews the pair."""
        if pair is ABSENT:
            return ABSENT
        value, last_used = pair
        if last_used <= self.dead_until():
            remove()
            return value if self._return_expired else ABSENT
        if self._on_read:
            used = self._use()
            if used > last_used:
                write((value, used))
        return value

    def used(self, pair: Any) -> int:
        """Return the time of a use now. A record that is older than the last one does not shorten the
        life of an entry.
        """
        now = self._use()
        return now if pair is ABSENT else max(now, pair[1])


class TtlValueTable(ValueTable):
    """A table whose values expire, on top of one that holds (value, last use)."""

    def __init__(self, inner: ValueTable, expiry: Expiry) -> None:
        self._inner = inner
        self._rules = _Rules(expiry, inner.sweep)
        self._late_uses = expiry.ttl.time == "event"

    def get(self) -> Any:
        inner = self._inner
        value = self._rules.read(inner.get(), inner.delete, inner.put)
        self._rules.clean()
        return value

    def put(self, value: Any) -> None:
        before = self._inner.get() if self._late_uses else ABSENT
        self._inner.put((value, self._rules.used(before)))
        self._rules.clean()

    def delete(self) -> None:
        self._inner.delete()

    def sweep(self, limit: int, dead_until: int) -> int:
        return self._inner.sweep(limit, dead_until)


class TtlEntryTable(EntryTable):
    """A table of lists or maps whose entries expire one by one."""

    def __init__(self, inner: EntryTable, expiry: Expiry) -> None:
        self._inner = inner
        self._rules = _Rules(expiry, inner.sweep)
        self._late_uses = expiry.ttl.time == "event"

    def get(self, entry: Any) -> Any:
        value = self._read(entry, self._inner.get(entry))
        self._rules.clean()
        return value

    def _read(self, entry: Any, pair: Any) -> Any:
        inner = self._inner
        return self._rules.read(
            pair, lambda: inner.delete(entry), lambda renewed: inner.put(entry, renewed)
        )

    def put(self, entry: Any, value: Any) -> None:
        before = self._inner.get(entry) if self._late_uses else ABSENT
        self._inner.put(entry, (value, self._rules.used(before)))
        self._rules.clean()

    def delete(self, entry: Any) -> None:
        self._inner.delete(entry)

    def entries(self) -> Iterator[tuple[Any, Any]]:
        return self._living(self._inner.entries())

    def _living(self, found: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        for entry, pair in found:
            value = self._passing(entry, pair)
            if value is not ABSENT:
                yield entry, value

    def _passing(self, entry: Any, pair: Any) -> Any:
        """Return the value of a pair that was read while iterating. There may be another pair in its
        place by now, or none, so the present one is renewed or removed.
        """

        def look_again(_: Any = None) -> None:
            self._read(entry, self._inner.get(entry))

        return self._rules.read(pair, look_again, look_again)

    def last(self) -> int:
        return self._inner.last()

    def empty(self) -> bool:
        dead_until = self._rules.dead_until()
        return not any(pair[1] > dead_until for _, pair in self._inner.entries())

    def clear(self) -> None:
        self._inner.clear()

    def sweep(self, limit: int, dead_until: int) -> int:
        return self._inner.sweep(limit, dead_until)
