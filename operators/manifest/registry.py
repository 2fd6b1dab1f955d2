"""What a manifest may name but operators/ does not know: connectors, options, the job class.

`runtime/manifest.py` fills a `Toolbox`; the rooms below only see these descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ...errors import HeadgateError
from ..sink import Guarantee, Sink
from ..source import Source
from ..written_job import WrittenJob
from .fields import Section


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """What a manifest says about a source besides the connector's own fields.

    Attributes:
        schema: the Arrow schema or the user's class, None if the manifest has no `schema`.
        on_bad_record: `fail`, `side_output` or `drop`; None if the manifest does not say.
    """

    schema: pa.Schema | type[Any] | None = None
    on_bad_record: str | None = None


@dataclass(frozen=True, slots=True)
class SourceConnector:
    """A source a manifest can name.

    Attributes:
        fields: the fields below the connector's key.
        make: makes the source from the fields that were given; raises UsageError.
        schema: does it take a `schema`? `required`, `optional` or `refused`.
        bad_records: can it meet records it cannot read, so that `onBadRecord` means something?
        tables: can it be read as a whole, as the table of a `lookup`?
    """

    fields: Section
    make: Callable[[Mapping[str, Any], SourceSpec], Source]
    schema: str = "optional"
    bad_records: bool = False
    tables: bool = False


@dataclass(frozen=True, slots=True)
class SinkConnector:
    """A sink a manifest can name.

    Attributes:
        make: makes the sink from the fields that were given and the guarantee; raises UsageError.
        guarantees: what it can do.
        guarantee_required: must the manifest say which it wants?
    """

    fields: Section
    make: Callable[[Mapping[str, Any], str | None], Sink]
    guarantees: frozenset[Guarantee]
    guarantee_required: bool = True


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Everything the builder gets from the rooms above.

    Attributes:
        new_job: makes the empty job: `new_job(name, parallelism=, max_parallelism=, options=)`.
        check_options: what is wrong with option texts, by key.
        current_key: the current key of an option that may be given by an older one.
    """

    sources: Mapping[str, SourceConnector]
    sinks: Mapping[str, SinkConnector]
    new_job: Callable[..., WrittenJob]
    check_options: Callable[[Mapping[str, str]], Mapping[str, HeadgateError]]
    current_key: Callable[[str], str]
