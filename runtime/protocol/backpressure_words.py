"""Explains a backpressure finding in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .backpressure import OK_MAX_MS, Finding, Pressed, SubtaskLoad, Suspect, WaitsFor

NAMED_MAX: Final = 3
"""The number of vertices that are named, among those that wait for the same one."""


def explain(finding: Finding) -> str:
    """Name the vertices that wait, and the cause; or the state downstream, if none of it is busy."""
    pressed = _pressed(finding.pressed)
    if finding.cause is not None:
        return f"{pressed} because of {_blamed(finding.cause)}"
    if not finding.waiting:
        return f"{pressed}; nothing is known yet about what is downstream"
    seen = "; ".join(_waiting(suspect) for suspect in finding.waiting)
    return f"{pressed}, but nobody downstream is busy: {seen}"


def _pressed(pressed: Sequence[Pressed]) -> str:
    named = [f"`{each.vertex.name}`" for each in pressed[:NAMED_MAX]]
    worst = max(pressed, key=lambda each: each.backpressured)
    level = f"{worst.level}, {_percent(worst.backpressured / 1000)}"
    if len(pressed) == 1:
        return f"{named[0]} is backpressured ({level})"
    left = len(pressed) - len(named)
    if left:
        named.append(f"{left} more")
    return f"{', '.join(named[:-1])} and {named[-1]} are backpressured (up to {level})"


def _blamed(cause: Suspect) -> str:
    text = f"{cause.name}, {_time(cause.load)}"
    if cause.load.waits_for is WaitsFor.CALLS:
        text += " with the most calls in flight that it may have"
    share = cause.records_share
    if share is not None and (cause.is_skewed or cause.key_group is not None):
        return f"{text}: it gets {_percent(share)} of the records{_in_group(cause)}"
    if cause.busy_subtasks == cause.vertex.parallelism > 1:
        return f"{text}: all its subtasks are busy"
    return text


def _in_group(cause: Suspect) -> str:
    if cause.key_group is None or cause.key_group_share is None:
        return ""
    return f", {_percent(cause.key_group_share)} of them in key group {cause.key_group}"


def _waiting(suspect: Suspect) -> str:
    text = f"{suspect.name}, {_time(suspect.load)}"
    match suspect.load.waits_for:
        case WaitsFor.CALLS:
            return f"{text}, has the most calls in flight that it may have"
        case WaitsFor.BARRIERS:
            return f"{text}, waits for the other barriers of a checkpoint"
        case WaitsFor.NOTHING:
            return text


def _time(load: SubtaskLoad) -> str:
    """Return the time use, as far as others wait for it."""
    parts = {"busy": load.busy, "full": load.full}
    said = [f"{what} {_percent(ms / 1000)}" for what, ms in parts.items() if ms > OK_MAX_MS]
    return ", ".join(said) or f"busy {_percent(load.busy / 1000)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
