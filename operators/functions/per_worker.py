"""per_worker: an object that cannot be sent to workers and is made in each of them on first use."""

from __future__ import annotations

import inspect
import logging
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from ...errors import PlanError
from ..origin import capture_origin
from .checks import check_plain

T = TypeVar("T")

_log: Final = logging.getLogger("headgate.per_worker")
_lock: Final = threading.RLock()
_handles: Final[dict[str, PerWorker[Any]]] = {}
"""The handles in this process, by identity, so that all users share one."""
_users: list[object] = []
"""The workers that run in this process: the last to end closes the objects."""


class PerWorker(Generic[T]):
    """A handle that is sent with the job. Calling it returns the object of this process."""

    def __init__(self, factory: Callable[[], T], identity: str) -> None:
        self._factory = factory
        self._identity = identity
        self._made: list[T] = []

    def __call__(self) -> T:
        """Return the object; the first call in a process makes it, and others wait for that."""
        with _lock:
            if not self._made:
                self._made.append(self._factory())
                _handles[self._identity] = self
            return self._made[0]

    if not TYPE_CHECKING:  # a type checker would take it to mean that any name exists

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise AttributeError(
                f"a per_worker object has no attribute `{name}`: call it first, as in handle().{name}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle, (self._factory, self._identity)

    def take(self) -> list[T]:
        """Give up the object, if there is one: the next call makes another."""
        made, self._made = self._made, []
        return made


def _handle(factory: Callable[[], T], identity: str) -> PerWorker[T]:
    """Return the handle of that identity in this process."""
    with _lock:
        return _handles.setdefault(identity, PerWorker(factory, identity))


def per_worker(factory: Callable[[], T]) -> PerWorker[T]:
    """Make an object in each worker process, such as an HTTP client, a connection or a model.

        client = hg.per_worker(lambda: httpx.Client(timeout=5))

        def price(row):
            return client().get(f"/prices/{row.item}").json()

    Objects that hold locks, sockets or open files cannot be sent to workers. This handle can: it
    makes the object in the process in which it is called first, and all functions there share it,
    in all subtasks and over restarts of the job. Functions that run in threads call it from there:
    the object must support that.

    When the last worker of the process ends, headgate calls `aclose()` or else `close()` of the object, if
    it has either, and awaits a coroutine. A process that is killed calls nothing.

    Args:
        factory: called without arguments. What it raises is an error of the function that uses the object.

    Raises:
        PlanError: the factory is not a plain function.
    """
    origin = capture_origin()
    check_plain(factory, "per_worker", origin)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise PlanError(
            f"the factory of per_worker takes no arguments: {error}", where=str(origin)
        ) from None
    except ValueError:  # a built-in without a signature
        pass
    return PerWorker(factory, secrets.token_hex(8))


def worker_begins(worker: object) -> None:
    """Note that a worker of this process has begun."""
    with _lock:
        _users.append(worker)


async def worker_ends(worker: object) -> None:
    """Note that a worker of this process has ended; the last one closes all objects. Never raises."""
    with _lock:
        _users.remove(worker)
        if _users:
            return
        objects = [each for handle in _handles.values() for each in handle.take()]
        _handles.clear()
    for each in reversed(objects):
        await _close(each)


async def _close(made: object) -> None:
    close = getattr(made, "aclose", None) or getattr(made, "close", None)
    if not callable(close):
        return
    try:
        closing = close()
        if inspect.isawaitable(closing):
            await closing
    except Exception as error:
        _log.warning(
            "closing an object of per_worker failed type=`%s` error=`%s: %s`",
            type(made).__name__,
            type(error).__name__,
            error,
        )
