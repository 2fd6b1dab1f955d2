"""`lookup`: each record with the entry for its key in a service, a database or a static table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...operators.joins.static_table import StaticTable, static_table
from ..stream import Stream
from .call_steps import CALL_OPTIONS, call_options
from .fields import (
    REFERENCE,
    ChoiceKind,
    Field,
    IntegerKind,
    ListOf,
    Section,
    Table,
    TextKind,
    duration,
    size,
)
from .registry import LookupConnector, SourceConnector, lookups_of
from .step import SCHEMA, Step, StepBuilder, Verb, function_of, given

_CACHE: Final = ("cacheRows", "cacheFor")


def plan_lookup(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Plan `lookup`, with `python`, `table` or a connector."""
    section = table.get("lookup")
    if section is None:
        return None
    connectors = builder.lookup_connectors()
    tried = section.present(["python", "table", *connectors])
    if len(tried) != 1:
        builder.problems.add(
            section.line_of("table"),
            f"lookup needs either {', '.join(['python', *connectors])} or table operator=`{name}`",
            'python: "module:function", a coroutine function of the key; or table: {parquet: ...}',
        )
        return None
    if tried == ["table"]:
        return _in_table(name, table, section, builder)
    if tried == ["python"]:
        return _in_service(name, table, section, builder)
    return _in_connector(name, table, section, tried[0], connectors[tried[0]], builder)


def _in_service(name: str, table: Table, section: Table, builder: StepBuilder) -> Step | None:
    line, function = section.line_of("python"), function_of(section, "python", builder)
    into, options = builder.schema_of(table, "into"), call_options(table, builder)
    if not table.tried("into"):
        builder.problems.add(
            table.line_of("lookup"),
            f"lookup has no into operator=`{name}`",
            "into: {column: type}, the columns that the function finds",
        )
    _refuse(["how"], section, "a lookup with python", name, builder)
    if function is None or into is None or options is None or section.bad:
        return None
    options |= given(section, suffix="suffix", cache_rows="cacheRows", cache_for="cacheFor")
    return _step(name, section, line, function, {**options, "into": into}, builder)


def _in_connector(
    name: str,
    table: Table,
    section: Table,
    chosen: str,
    connector: LookupConnector,
    builder: StepBuilder,
) -> Step | None:
    line, fields, options = (
        section.line_of(chosen),
        section.get(chosen),
        call_options(table, builder),
    )
    into = builder.schema_of(table, "into") if table.tried("into") else None
    _refuse(["how"], section, f"a lookup in {chosen}", name, builder)
    if fields is None or fields.bad or options is None or section.bad:
        return None
    made = builder.attempt(line, lambda: connector.make(fields.values, into))
    if made is None:
        return None
    options |= given(section, suffix="suffix", cache_rows="cacheRows", cache_for="cacheFor")
    return _step(name, section, line, made, options, builder)


def _in_table(name: str, table: Table, section: Table, builder: StepBuilder) -> Step | None:
    _refuse(list(CALL_OPTIONS), table, "a lookup in a table", name, builder)
    _refuse(_CACHE, section, "a lookup in a table", name, builder)
    described = section.get("table")
    made = None if described is None else _table(name, described, builder)
    if made is None or section.bad:
        return None
    options = given(section, how="how", suffix="suffix")
    return _step(name, section, section.line_of("key"), made, options, builder)


def _table(name: str, described: Table, builder: StepBuilder) -> StaticTable | None:
    source: Any = builder.files_of(described, name)
    if source is None or described.bad:
        return None
    options = given(
        described, key="key", columns="columns", max_bytes="maxBytes", duplicates="duplicates"
    )
    return builder.attempt(described.line_of("key"), lambda: static_table(source, **options))


def _step(
    name: str, section: Table, line: int, within: Any, options: dict[str, Any], builder: StepBuilder
) -> Step:
    """Plan the lookup in `within`, a function or a table."""
    keys = section.get("key")
    key = keys[0] if len(keys) == 1 else tuple(keys)

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        lookup: Any = flows[0].lookup
        return builder.attempt(line, lambda: lookup(key, within, name=name, **options))

    return step


def _refuse(
    fields: Sequence[str], table: Table, what: str, name: str, builder: StepBuilder
) -> None:
    for field in table.present(fields):
        builder.problems.add(
            table.line_of(field), f"{field} has no effect for {what} operator=`{name}`", "remove it"
        )


def _lookup_section(connectors: Mapping[str, SourceConnector]) -> Section:
    files = {
        name: Field(connector.fields, f"read with {name}")
        for name, connector in connectors.items()
        if connector.tables
    }
    table = Section(
        "table",
        {
            **files,
            "schema": Field(SCHEMA, "columns and types, a source with the same, or a class"),
            "key": Field(
                ListOf(TextKind()), "columns that records are looked up by", required=True
            ),
            "columns": Field(ListOf(TextKind()), "columns added to the records; all but the key"),
            "maxBytes": Field(size(), "the most that its columns may take in memory; 64mb"),
            "duplicates": Field(
                ChoiceKind(("fail", "first", "last")),
                "which of several rows with equal keys counts",
            ),
        },
    )
    return Section(
        "lookup",
        {
            "key": Field(
                ListOf(TextKind()), "columns of the record that are looked up", required=True
            ),
            "python": Field(
                REFERENCE, "a coroutine function key -> record or None, `module:function`"
            ),
            "table": Field(table, "instead: a table in files, read as a whole at the start"),
            **{
                name: Field(connector.fields, f"instead: rows that are looked up in {name}")
                for name, connector in lookups_of(connectors).items()
            },
            "how": Field(
                ChoiceKind(("inner", "left")),
                "of a table: `left`, or `inner`: only records it has a row for",
            ),
            "suffix": Field(TextKind(), "appended to found columns whose names are taken"),
            "cacheRows": Field(
                IntegerKind(0, 2**31 - 1), "answers kept, but not of a table; 0: none"
            ),
            "cacheFor": Field(duration(), "how long such an answer is valid"),
        },
    )


def lookup_verb(connectors: Mapping[str, SourceConnector]) -> Verb:
    """Return the verb `lookup`, whose tables may be read by those connectors that make tables."""
    field = Field(_lookup_section(connectors), "join each record with the entry for its key")
    return Verb("lookup", field, plan_lookup, CALL_OPTIONS)
