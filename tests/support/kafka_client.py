"""The client of Kafka and its messages, without a broker: for tests of what is made of them."""

from __future__ import annotations

from typing import Any


class FakeMessage:
    """A message, or an event such as the end of a partition, as the client returns it."""

    def __init__(
        self, topic: str, partition: int, offset: int, value: bytes | None, error: Any = None
    ) -> None:
        self._topic, self._partition, self._offset = topic, partition, offset
        self._value, self._error = value, error

    def __len__(self) -> int:
        return len(self._value or b"")

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def error(self) -> Any:
        return self._error

    def value(self) -> bytes | None:
        return self._value

    def key(self) -> bytes:
        return f"key {self._offset}".encode()

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_000 + self._offset


class FakeClient:
    """A client that has these messages; it notes how many of them it is asked for at once."""

    def __init__(self, messages: list[FakeMessage]) -> None:
        self.messages = messages
        self.asked: list[int] = []

    def poll(self, timeout: float) -> FakeMessage | None:
        return self.messages.pop(0) if self.messages else None

    def consume(self, count: int, timeout: float) -> list[FakeMessage]:
        self.asked.append(count)
        found, self.messages = self.messages[:count], self.messages[count:]
        return found

    def pause(self, places: list[Any]) -> None:
        """Do nothing."""
