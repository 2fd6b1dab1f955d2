"""What a listener grants to strangers: few connections, little memory, and little time.

Every user of the machine can connect to a TCP port, and whoever has not shown the job's token yet may be
hostile. So each listener counts its connections here. When too many strangers are connected the one that
has waited longest is closed, not the newcomer: our own processes show the token right after they have
connected, and so they still get in while somebody holds idle connections open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from .options.network import (
    CONNECTIONS_MAX,
    FRAME_SIZE_MAX,
    HANDSHAKE_TIMEOUT,
    MESSAGE_SIZE_MAX,
    UNAUTHENTICATED_MAX,
    UNSENT_SIZE_MAX,
)
from .options.registry import Options

GREETING_BYTES_MAX = 16 * 1024
"""The longest first message, or HTTP request, that is read from a stranger."""
_log = logging.getLogger("headgate.listener")


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """The limits of one listener; `options/network.py` explains each."""

    handshake_timeout_ms: int = HANDSHAKE_TIMEOUT.default
    unauthenticated_max: int = UNAUTHENTICATED_MAX.default
    connections_max: int = CONNECTIONS_MAX.default
    frame_size_max_bytes: int = FRAME_SIZE_MAX.default
    message_size_max_bytes: int = MESSAGE_SIZE_MAX.default
    unsent_max_bytes: int = UNSENT_SIZE_MAX.default

    @classmethod
    def of(cls, options: Options) -> ListenerLimits:
        """The limits that a job's options set."""
        return cls(
            handshake_timeout_ms=options.get(HANDSHAKE_TIMEOUT),
            unauthenticated_max=options.get(UNAUTHENTICATED_MAX),
            connections_max=options.get(CONNECTIONS_MAX),
            frame_size_max_bytes=options.get(FRAME_SIZE_MAX),
            message_size_max_bytes=options.get(MESSAGE_SIZE_MAX),
            unsent_max_bytes=options.get(UNSENT_SIZE_MAX),
        )

    @property
    def handshake_timeout_s(self) -> float:
        """The same time in seconds."""
        return self.handshake_timeout_ms / 1000


class Admission:
    """The open connections of one listener. Not thread-safe."""

    def __init__(self, limits: ListenerLimits, listener: str) -> None:
        """No connection is open.

        Args:
            limits: the bounds.
            listener: its name in the log.
        """
        self.limits = limits
        self._listener = listener
        self._strangers: dict[object, Callable[[], None]] = {}
        self._authenticated: set[object] = set()
        self.turned_away = 0
        """How many connections were closed because there were too many."""

    def enter(self, connection: object, hang_up: Callable[[], None]) -> None:
        """Count a new connection. `hang_up` is called, perhaps at once, when there is no room for it."""
        self._strangers[connection] = hang_up
        open_ = len(self._strangers) + len(self._authenticated)
        limits = self.limits
        if len(self._strangers) > limits.unauthenticated_max or open_ > limits.connections_max:
            self._turn_away(next(iter(self._strangers)))

    def authenticate(self, connection: object) -> None:
        """The peer has shown the token: from now on the connection is not closed for want of room."""
        if self._strangers.pop(connection, None) is not None:
            self._authenticated.add(connection)

    def leave(self, connection: object) -> None:
        """The connection is closed. It may be unknown here."""
        self._strangers.pop(connection, None)
        self._authenticated.discard(connection)

    def _turn_away(self, connection: object) -> None:
        hang_up = self._strangers.pop(connection)
        self.turned_away += 1
        if self.turned_away.bit_count() == 1:  # the first, then each time there are twice as many
            _log.warning(
                "too many connections, so one that has not shown the job's token was closed "
                "listener=`%s` closed_so_far=`%s` unauthenticated_max=`%s` connections_max=`%s`",
                self._listener,
                self.turned_away,
                self.limits.unauthenticated_max,
                self.limits.connections_max,
            )
        hang_up()
