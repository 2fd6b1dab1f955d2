"""Calls a user's function for the records of a batch, under the step's error policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from ..base import OperatorContext, Output
from ..elements import Batch
from ..functions.dead_letters import FAIL, DeadLetters
from ..rows import RowMismatch
from .base import UserFunction

Answered: TypeAlias = tuple[Batch, list[Any], list[Any]]
"""The records that have a result, as a batch and as records, and their results."""


class Guard:
    """The guard of one operator subtask, whose `open` calls `open`."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user
        self._plain = user.on_error == FAIL
        self._letters = DeadLetters(user.step, user.origin, user.on_error)

    def open(self, context: OperatorContext, output: Output) -> None:
        """Set up the counting and sending of failed records."""
        if self._user.on_error.then != "fail":
            self._letters.open(context, output)

    def results(self, batch: Batch) -> Answered:
        """Call the function for each record; failed records become dead letters.

        Raises:
            UserCodeError: it raised, and the policy is to fail.
        """
        records = self._user.reader(batch)
        if self._plain:
            return batch, records, self._user.apply(records)
        results, failures = self._user.attempt(records)
        return self.without(batch, records, results, failures)

    async def results_async(self, batch: Batch) -> Answered:
        """The same for a coroutine function."""
        records = self._user.reader(batch)
        failures: dict[int, BaseException] = {}
        results = await self._user.apply_async(records, failures)
        return self.without(batch, records, results, failures)

    def without(
        self,
        batch: Batch,
        records: list[Any],
        results: list[Any],
        failures: Mapping[int, BaseException],
    ) -> Answered:
        """Make dead letters of the records at the places of `failures`, and return the others."""
        if not failures:
            return batch, records, results
        lost = sorted(failures)
        self._letters.take(batch.take(np.array(lost)), [failures[place] for place in lost])
        kept = [place for place in range(len(records)) if place not in failures]
        return (
            batch.take(np.array(kept, np.intp)),
            [records[place] for place in kept],
            [results[place] for place in kept],
        )

    def batch(self, answered: Answered) -> Batch:
        """Return a batch of one result per record; a result that does not fit `into` is a failure
        as well."""
        batch, records, results = answered
        if self._plain or self._user.into is None:
            return self._user.batch(results, batch.timestamps, records, batch.positions)
        try:
            return self._user.columns(results, batch.timestamps, batch.positions)
        except RowMismatch:
            unfit = self.unfit([[result] for result in results])
            batch, records, results = self.without(batch, records, results, unfit)
            return self._user.batch(results, batch.timestamps, records, batch.positions)

    def unfit(self, results: list[list[Any]]) -> dict[int, BaseException]:
        """Return the places of records with results that do not fit the columns of `into`."""
        user = self._user
        if user.into is None or user.on_error.then == "fail":
            return {}
        try:
            user.columns([each for made in results for each in made], None)
        except RowMismatch:
            pass
        else:
            return {}
        failures: dict[int, BaseException] = {}
        for place, made in enumerate(results):
            try:
                user.columns(made, None)
            except RowMismatch as error:
                failures[place] = error
        return failures
