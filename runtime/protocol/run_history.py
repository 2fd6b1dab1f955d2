"""The history of a job's runs: the ends of runs that the log keeps, and facts that entries repeat.

The end of a run is an entry of the job log (`JobEnded`), and there is no other record of it.
Entries that no checkpoint needs are trimmed, so the history is a list of the ends that trimming
keeps. Each entry repeats that list, because the entry before it may have been trimmed.
"""

from __future__ import annotations

from typing import Final, final

import msgspec

from ...state.sealed import Record


@final
class RunHistory(Record, frozen=True, kw_only=True):
    """The facts about its run, and the runs before it, that an entry of the job log repeats."""

    job: str = ""
    """The name of the job; empty in entries of before it was recorded."""
    began_ms: int = 0
    """When the run began, in ms since the epoch; 0: unknown."""
    restarts: int = 0
    """The restarts of tasks in this run under all its coordinators.

    Those between the last entry of a coordinator that died and its death are missing.
    """
    ends: tuple[int, ...] = ()
    """Sequences of the `JobEnded` entries that are kept, the oldest first."""

    def next_run(self, job: str, now_ms: int, kept: int) -> RunHistory:
        """Return the history of a run that begins now, with the newest `kept` ends of former runs."""
        return RunHistory(job=job, began_ms=now_ms, ends=self._newest(kept))

    def taken_over(self, job: str, now_ms: int, kept: int) -> RunHistory:
        """Return the history of the same run under another coordinator."""
        return msgspec.structs.replace(
            self, job=job, began_ms=self.began_ms or now_ms, ends=self._newest(kept)
        )

    def ended(self, sequence: int, instead: int = 0) -> RunHistory:
        """Return the history with the end in the entry `sequence` added, replacing that in `instead`."""
        ends = tuple(each for each in self.ends if each != instead)
        return msgspec.structs.replace(self, ends=(*ends, sequence))

    def restarted(self, restarts: int) -> RunHistory:
        """Return the history with restarts of the present coordinator added."""
        return msgspec.structs.replace(self, restarts=self.restarts + restarts)

    def _newest(self, kept: int) -> tuple[int, ...]:
        return self.ends[max(0, len(self.ends) - kept) :]


NO_HISTORY: Final = RunHistory()
"""The history in entries that were written before it existed."""
