"""`hybrid` in a manifest: two of the other sources, one behind the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..api.manifest.fields import REFERENCE, Field, Section, Table, Text
from ..api.manifest.references import resolve_function
from ..api.manifest.registry import SourceConnector, SourceSpec
from ..errors import UsageError
from ..operators.source import Source
from .hybrid import hybrid_source


def hybrid_connector(others: Mapping[str, SourceConnector]) -> SourceConnector:
    """The connector `hybrid` of these."""
    fields = {name: Field(each.fields, f"read with {name}") for name, each in others.items()}

    def make(values: Mapping[str, Any], spec: SourceSpec) -> Source:
        if ("live" in values) == ("liveFunction" in values):
            raise UsageError(
                "hybrid needs either live or liveFunction",
                fix="live: {generator: ...}, or another source; or liveFunction: module:function",
            )
        history = _part("history", values["history"], spec, others)
        live: Any = (
            _part("live", values["live"], spec, others)
            if "live" in values
            else resolve_function(values["liveFunction"])
        )
        return hybrid_source(history, live, time_column=values.get("timeColumn"))

    return SourceConnector(
        Section(
            "hybrid",
            {
                "history": Field(
                    Section("history", fields), "what is read first: a source with an end", True
                ),
                "live": Field(Section("live", fields), "what is read then: another source"),
                "liveFunction": Field(
                    REFERENCE,
                    "instead: a function of the highest event time of the history, in ms since 1970, "
                    "that returns the source, `module:function`",
                ),
                "timeColumn": Field(Text(), "with liveFunction: the column it is the highest of"),
            },
        ),
        make,
        bad_records=True,
    )


def _part(
    what: str, table: Table, spec: SourceSpec, others: Mapping[str, SourceConnector]
) -> Source:
    """The source that stands in `history` or `live`; what is beside `hybrid` holds for both."""
    chosen = table.present(list(others))
    if len(chosen) != 1:
        raise UsageError(
            f"{what} needs exactly one source found=`{', '.join(chosen)}`",
            fix=f"one of: {', '.join(others)}",
        )
    connector = others[chosen[0]]
    if spec.schema is None and connector.schema == "required":
        raise UsageError(
            f"{what} has no schema source=`{chosen[0]}`",
            fix="schema: {column: type, ...}, beside hybrid",
        )
    fields = table.values[chosen[0]].values
    # Generated rows say themselves what their columns are; they are compared later.
    takes_schema = connector.schema != "refused" and not {"fields", "function"} & fields.keys()
    own = replace(
        spec,
        schema=spec.schema if takes_schema else None,
        on_bad_record=spec.on_bad_record if connector.bad_records else None,
    )
    return connector.make(fields, own)
