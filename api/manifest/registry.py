"""The parts of a manifest that operators/ does not know: connectors, options, the job class.

`runtime/manifest.py` fills a `Toolbox`; the builder only sees these descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ...errors import HeadgateError
from ...operators.joins.lookup import LookupService
from ...operators.sink import Guarantee, Sink
from ...operators.source import Source
from ..job_definition import WrittenJob
from .fields import Section


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """The fields of a source outside its connector.

    Attributes:
        schema: the Arrow schema or the user's class; None without `schema`.
        on_bad_record: `fail`, `side_output` or `drop`; None if not given.
    """

    schema: pa.Schema | type[Any] | None = None
    on_bad_record: str | None = None


@dataclass(frozen=True, slots=True)
class LookupConnector:
    """A place in which a manifest's `lookup` can look rows up by key.

    Attributes:
        fields: the fields below the connector's key.
        make: makes the function from the given fields and the columns to find, None if they are not
            given; raises UsageError.
    """

    fields: Section
    make: Callable[[Mapping[str, Any], pa.Schema | type[Any] | None], LookupService]


@dataclass(frozen=True, slots=True)
class SourceConnector:
    """A source that a manifest can name.

    Attributes:
        fields: the fields below the connector's key.
        make: makes the source from the given fields; raises UsageError.
        schema: whether it takes a `schema`: `required`, `optional` or `refused`.
        bad_records: whether it can meet unreadable records, so that `onBadRecord` applies.
        tables: whether it can be read as a whole, as the table of a `lookup`.
        lookup: how a `lookup` finds rows there by key; None: it cannot.
    """

    fields: Section
    make: Callable[[Mapping[str, Any], SourceSpec], Source]
    schema: str = "optional"
    bad_records: bool = False
    tables: bool = False
    lookup: LookupConnector | None = None


def lookups_of(sources: Mapping[str, SourceConnector]) -> dict[str, LookupConnector]:
    """Return the places in which a `lookup` can look rows up by key."""
    return {name: each.lookup for name, each in sources.items() if each.lookup is not None}


@dataclass(frozen=True, slots=True)
class SinkConnector:
    """A sink that a manifest can name.

    Attributes:
        make: makes the sink from the given fields and the guarantee; raises UsageError.
        guarantees: the guarantees that it supports.
        guarantee_required: whether the manifest must choose one.
    """

    fields: Section
    make: Callable[[Mapping[str, Any], str | None], Sink]
    guarantees: frozenset[Guarantee]
    guarantee_required: bool = True


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The dependencies of the builder.

    Attributes:
        new_job: makes the empty job: `new_job(name, parallelism=, max_parallelism=, options=)`.
        check_options: returns the problems of option texts, by key.
        current_key: returns the current key of an option that may be given by an older one.
    """

    sources: Mapping[str, SourceConnector]
    sinks: Mapping[str, SinkConnector]
    new_job: Callable[..., WrittenJob]
    check_options: Callable[[Mapping[str, str]], Mapping[str, HeadgateError]]
    current_key: Callable[[str], str]
