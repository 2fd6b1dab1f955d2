"""Asynchronous calls for callers that have no event loop, or one that must not be blocked by another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def blocking(call: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop of its own, in a thread: a notebook has a loop already."""
    with ThreadPoolExecutor(1, thread_name_prefix="headgate-offline") as thread:
        return thread.submit(asyncio.run, call).result()
