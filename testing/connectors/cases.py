"""The author's side of a connector's checks: how to fill a place, and how to look at it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Literal, Protocol, TypeVar

from ...operators.elements import Batch
from ...operators.sink import GuaranteeLike, Sink
from ...operators.source import Source
from ..proxy import CuttingProxy

OnBadRecord = Literal["fail", "drop", "side_output"]


class Feature(Enum):
    """A capability of a connector beyond the least. Checks of capabilities it lacks are skipped."""

    SERVER = "a server that can be killed and started again"
    LIVE = "a source without an end, which waits for records"
    BAD_RECORDS = "a policy for records that cannot be read"
    LAG = "the number of records that are still to be read"
    CONFIRMS = "positions of completed checkpoints are confirmed outside"
    ACKNOWLEDGES = "messages that completed checkpoints acknowledge, instead of positions"
    UNREPEATED = "records that come once, and cannot be read again"
    CUTS = "connections to a server that may break at any byte"
    MISTAKES = "settings that cannot work, such as a wrong password"
    CONNECTS = "a connection that can be checked before a run"
    EXACTLY_ONCE = "exactly-once output"
    AT_LEAST_ONCE = "output at least once"
    PENDING = "output that is written and not visible can be listed"


class Server(Protocol):
    """A server of tests. `headgate.testing.servers` has recipes."""

    def start(self) -> None:
        """Start it, again after `kill` with what it had made durable; return when it answers."""

    def kill(self) -> None:
        """End it at once, as `kill -9` does."""


class Case:
    """One connector under test. A subclass says what the connector can do.

    Attributes:
        features: what is to be checked beside the least.
        secrets: texts that must not appear in errors, descriptions or `repr`.
        unseen: names of `mistakes` that `check_connection` does not find, as that would take a request
            which changes something (CONNECTS).
        server: for the feature SERVER.
    """

    features: frozenset[Feature] = frozenset()
    secrets: Sequence[str] = ()
    unseen: frozenset[str] = frozenset()
    server: Server | None = None

    def place(self) -> AbstractContextManager[Any]:
        """Make an empty place of its own for one check, such as a directory, a table or a topic."""
        raise NotImplementedError

    def cutting(self) -> AbstractContextManager[CuttingProxy]:
        """Let what is made in the block connect through a proxy, which the block gets (CUTS)."""
        raise NotImplementedError

    def records(self) -> Sequence[Any]:
        """Return a dozen records, all different: dicts of the columns, or Python objects."""
        raise NotImplementedError


class SourceCase(Case):
    """A source under test.

    Attributes:
        unacknowledged_max: the most messages that a reader of `source` has and no complete checkpoint; more
            than there are `records` (ACKNOWLEDGES).
    """

    unacknowledged_max: int = 0

    def put(self, place: Any, records: Sequence[Any]) -> None:
        """Append records to the place. They can be read when this returns.

        Records that come once are kept while no reader is connected (UNREPEATED). What is put when a
        connection has ended must not go into that, but to the next reader.
        """
        raise NotImplementedError

    def source(self, place: Any) -> Source:
        """Return a source that ends behind the records that are there now.

        Its batches should be small, best of one record, because it is stopped behind each batch. One that
        acknowledges messages does not end, and is the same as `live`. The service must give what a reader
        has not acknowledged soon again when that is gone (ACKNOWLEDGES).
        """
        raise NotImplementedError

    def live(self, place: Any) -> Source:
        """Return a source that goes on waiting for records (LIVE)."""
        raise NotImplementedError

    def put_bad(self, place: Any) -> None:
        """Append a record that cannot be read (BAD_RECORDS)."""
        raise NotImplementedError

    def tolerant(self, place: Any, on_bad_record: OnBadRecord) -> Source:
        """Return the source with this policy for records that cannot be read (BAD_RECORDS)."""
        raise NotImplementedError

    def confirmed(self, place: Any) -> int:
        """Return how many records the outside knows to be read, also while a reader reads (CONFIRMS)."""
        raise NotImplementedError

    def mistakes(self, place: Any) -> Mapping[str, tuple[Source, str]]:
        """Return sources that cannot work, by a name, with a part of the reason to be told (MISTAKES)."""
        raise NotImplementedError


class SinkCase(Case):
    """A sink under test."""

    def batches(self, records: Sequence[Any]) -> list[Batch]:
        """Return the records in batches of the kind that the sink takes, one of one or two records each."""
        raise NotImplementedError

    def sink(self, place: Any, guarantee: GuaranteeLike) -> Sink:
        """Return a sink with this guarantee that writes to the place."""
        raise NotImplementedError

    def visible(self, place: Any) -> list[Any]:
        """Return the records that a reader sees there, in any order, in the form of `records`."""
        raise NotImplementedError

    def pending(self, place: Any) -> Sequence[Any]:
        """Return what is written there and neither visible nor deleted (PENDING)."""
        raise NotImplementedError

    def mistakes(self, place: Any) -> Mapping[str, tuple[Sink, str]]:
        """Return sinks that cannot work, by a name, with a part of the reason to be told (MISTAKES)."""
        raise NotImplementedError


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class Check(Generic[C]):
    """One promise, and the function that tries to break it.

    Attributes:
        name: of the check, an identifier.
        promise: what holds for each connector that passes, a sentence.
        needs: the features without which the check does not apply.
        unless: the features with which it does not apply.
        thorough: True if it takes minutes with a real server.
    """

    name: str
    promise: str
    needs: frozenset[Feature]
    unless: frozenset[Feature]
    thorough: bool
    run: Callable[[C], Coroutine[Any, Any, None]]

    def applies_to(self, case: Case | type[Case]) -> bool:
        """Return True if the connector has all features that the check needs, and none that it excludes."""
        return self.needs <= case.features and not self.unless & case.features


class Checks(Generic[C]):
    """The checks of one kind of connector, in the order in which they are made."""

    def __init__(self) -> None:
        self.all: list[Check[C]] = []

    def check(
        self, *needs: Feature, unless: Sequence[Feature] = (), thorough: bool = False
    ) -> Callable[
        [Callable[[C], Coroutine[Any, Any, None]]], Callable[[C], Coroutine[Any, Any, None]]
    ]:
        """Add a function as a check; its docstring begins with the promise."""

        def add(
            function: Callable[[C], Coroutine[Any, Any, None]],
        ) -> Callable[[C], Coroutine[Any, Any, None]]:
            promise = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
            features = frozenset(needs), frozenset(unless)
            self.all.append(Check(function.__name__, promise, *features, thorough, function))
            return function

        return add
