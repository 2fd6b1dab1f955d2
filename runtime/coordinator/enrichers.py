"""Functions of the user's that add labels to failures in the history (features.md REC-09)."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from ...errors import OptionError
from ..options.recovery import FAILURE_ENRICHERS
from ..protocol.failure_history import FailureEntry, FailureRecord

Enricher = Callable[[dict[str, Any]], Mapping[str, str]]
LABELS_MAX: Final = 20
LABEL_TEXT_MAX: Final = 200
"""Characters of a label that are kept."""
_log = logging.getLogger("headgate.job")


def load_enrichers(text: str) -> list[Enricher]:
    """The functions that the option names.

    Raises:
        OptionError: one of them is not there.
    """
    return [_load(name) for name in (part.strip() for part in text.split(",")) if name]


def _load(name: str) -> Enricher:
    module, _, function = name.partition(":")
    try:
        found: Enricher = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # whatever the user's module does
        raise OptionError(
            f"no such failure enricher key=`{FAILURE_ENRICHERS.key}` value=`{name}`: {error}",
            fix="name a function that the coordinator can import: module:function",
        ) from error
    return found


class FailureEnrichers:
    """Calls them in a thread: nothing waits for what they look up, and none of them can fail the job."""

    def __init__(self, enrichers: Sequence[Enricher]) -> None:
        self._enrichers = enrichers
        self._under_way: set[asyncio.Task[None]] = set()

    def enrich(self, record: FailureRecord, entry: FailureEntry) -> None:
        """Add labels to a failure, as soon as they are known."""
        if self._enrichers:
            task = asyncio.get_running_loop().create_task(
                self._enrich(record, {**asdict(entry), "attempt": record.attempt}), name="enrichers"
            )
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _enrich(self, record: FailureRecord, failure: dict[str, Any]) -> None:
        for enricher in self._enrichers:
            try:
                labels = dict(await asyncio.to_thread(enricher, dict(failure)))
            except Exception as error:
                _log.warning("a failure enricher raised %s: %s", type(error).__name__, error)
                continue
            for key, value in labels.items():
                if len(record.labels) < LABELS_MAX:
                    record.labels[str(key)[:LABEL_TEXT_MAX]] = str(value)[:LABEL_TEXT_MAX]

    async def close(self) -> None:
        """Wait for those under way, not for long: their threads cannot be stopped."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=1.0)
        for task in self._under_way:
            task.cancel()
