"""Whether the embedded Ray still lives.

Without its raylet or its control store no worker can be started again. Ray would let the job wait for
ever in the first case, and end this process without a word after a minute in the second.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from ...errors import JobError

CHECK_EVERY_S = 1.0
VITAL = frozenset({"raylet", "gcs_server"})
_T = TypeVar("_T")


async def while_ray_lives(doing: Coroutine[None, None, _T]) -> _T:
    """The result of `doing`.

    Raises:
        JobError: a process of the embedded Ray died meanwhile.
    """
    task = asyncio.ensure_future(doing)
    try:
        while not task.done():
            if dead := _dead():
                raise JobError(
                    f"a process of the embedded Ray died process=`{dead}`",
                    fix="run the job again: it resumes from its newest checkpoint",
                )
            await asyncio.wait([task], timeout=CHECK_EVERY_S)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _dead() -> str:
    """The sort of a process that Ray started for this one and that is gone; empty if none is.

    Ray has no public way to ask: where a release lacks the private one, nobody notices.
    """
    node: Any = getattr(sys.modules.get("ray._private.worker"), "_global_node", None)
    if not hasattr(node, "dead_processes"):
        return ""
    return next((kind for kind, _ in node.dead_processes() if kind in VITAL), "")
