"""Checks of the services that a job needs, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from .sink import Sink
from .source import Source


@runtime_checkable
class ChecksConnection(Protocol):
    """A source or a sink that can look at its service without a run."""

    def check_connection(self, options: Mapping[str, str]) -> str:
        """Check that the service answers, that what is read or written is there, and the rights.

        Called in a thread, and may block. It must change nothing: it creates, writes, acknowledges and
        commits nothing, and takes no place in a group of readers. Secrets are read on this machine.

        Args:
            options: of the job.

        Returns:
            What was found, in a few words, such as `4 partitions`; empty if there is nothing to connect to.

        Raises:
            HeadgateError: a run would fail. The error has the reason, what to do about it, and no secret.
        """
        ...


def check_connection(connector: Source | Sink, options: Mapping[str, str]) -> str:
    """Check the connection of a source or a sink, as `ChecksConnection` says; empty: it has none."""
    if isinstance(connector, ChecksConnection):
        return connector.check_connection(options)
    return ""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 partition` or `4 partitions`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
