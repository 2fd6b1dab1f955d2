"""The same answer without streaming: one loop over all events in the order of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from query_file import Message
from rbea import (
    Event,
    Failure,
    Query,
    Result,
    Script,
    combine,
    events,
    run_script,
    to_event,
    window_starts,
)


def all_events(count: int, users: int) -> list[Event]:
    """Return the events that the job's generator makes."""
    rows = events(count, users).make(0, count).data.to_pylist()
    return [to_event(_Row(**row)) for row in rows]


class _Row:
    def __init__(self, **columns: int) -> None:
        vars(self).update(columns)


def standing(messages: Sequence[Message]) -> dict[str, Query]:
    """Every query there ever was, with its times."""
    queries: dict[str, Query] = {}
    for message in sorted(messages, key=lambda message: message.at):
        if message.add is not None:
            queries[f"{message.add}@{message.at}"] = Query(message.script, message.at)
        for key, query in queries.items():
            if key.rpartition("@")[0] == message.remove and query.until is None:
                queries[key] = Query(query.script, query.since, message.at)
    return queries


def answer(
    messages: Sequence[Message], count: int, users: int
) -> tuple[list[Result], list[Failure]]:
    """All results and failures, sorted."""
    queries = sorted(standing(messages).items())
    scripts: dict[str, Script] = {}
    variables: dict[tuple[int, str], dict[str, int]] = defaultdict(dict)
    windows: dict[tuple[str, str, str, str, int, int, int], int] = {}
    failures: list[Failure] = []
    for event in all_events(count, users):
        for key, query in queries:
            if not query.sees(event.at):
                continue
            name = key.rpartition("@")[0]
            done = run_script(scripts, name, query, event, variables[event.user, key])
            if isinstance(done, Failure):
                failures.append(done)
                continue
            for v in done:
                for start in window_starts(event.at, v.size_ms, v.every_ms):
                    window = (v.query, v.name, v.group, v.kind, v.size_ms, v.every_ms, start)
                    windows[window] = combine(v.kind, windows.get(window), v.value)
    results = [
        Result(query, name, group, start, value)
        for (query, name, group, _, _, _, start), value in windows.items()
    ]
    return sorted(results, key=repr), sorted(failures, key=repr)
