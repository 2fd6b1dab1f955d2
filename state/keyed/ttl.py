"""State that expires: what a user says about it, and tables that obey (features.md STA-11, STA-12).

An entry lives for `after` from its last use. Expired entries are removed when they are met, a few at each
access, in the background, and they are left out of full snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

from .base import ABSENT, EntryTable, ValueTable

_LEAST = -(2**63)


@dataclass(frozen=True, slots=True)
class StateTtl:
    """The time that the values of a state live.

    Attributes:
        after: a duration such as `"1d"`, or a timedelta; at least 1 ms.
        update: what counts as use: creating and writing, or reading too.
        expired: whether a value that has expired but was not removed yet is still returned (once).
        time: `processing`: the clock of the machine. `event`: entries are used at the event time of the
            record at hand, and expire when the watermark has come `after` further.
        cleanup_per_access: how many other entries are looked at for removal at each access.
        cleanup_per_second: how many in the background each second, per subtask.
    """

    after: str | timedelta
    update: Literal["write", "read_and_write"] = "write"
    expired: Literal["never_return", "return_if_not_cleaned_up"] = "never_return"
    time: Literal["processing", "event"] = "processing"
    cleanup_per_access: int = 5
    cleanup_per_second: int = 1000

    def problem(self) -> str:
        """What is wrong with it, in words; the duration is checked by who reads it."""
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


class TtlClock(Protocol):
    """The time of one kind, ms. All functions are cheap."""

    def now(self) -> int:
        """The time that expires entries of the current key."""
        ...

    def passed(self) -> int:
        """The time that has come for all keys: as `now`, unless that is further for the current key."""
        ...

    def use(self) -> int:
        """The time of a use that happens now."""
        ...


@dataclass(frozen=True, slots=True)
class Expiry:
    """The rules of one state, resolved."""

    after_ms: int
    ttl: StateTtl
    clock: TtlClock

    def dead_until(self) -> int:
        """Entries of the current key last used at or before this have expired."""
        return max(_LEAST, self.clock.now() - self.after_ms)

    def all_dead_until(self) -> int:
        """The same for entries of any key."""
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
        """Look at a few entries, as every access does."""
        if self._cleanup:
            self._sweep(self._cleanup, self._all_dead_until())

    def read(self, pair: Any, remove: Callable[[], None], write: Callable[[Any], None]) -> Any:
        """The value of what a table holds, or `ABSENT`; removes or renews it."""
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
        """The time of a use now; an older record than the last one does not shorten a life."""
        now = self._use()
        return now if pair is ABSENT else max(now, pair[1])


class TtlValueTable(ValueTable):
    """A table whose values expire, over one that holds (value, last use)."""

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
    """The same for lists and maps: entry by entry."""

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
        """The value of a pair met while iterating. By now there may be another in its place, or none: that
        is what is renewed or removed.
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
