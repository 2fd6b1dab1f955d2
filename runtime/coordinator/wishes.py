"""What clients wish for, checked before anything happens."""

from __future__ import annotations

import secrets
from typing import Any

from ...errors import UsageError
from ..checkpoint_options import (
    SAVEPOINT_DIR,
)
from ..plan import PhysicalPlan
from ..savepoint.locate import savepoint_address
from .context import ClientWish, JobContext


def check_keeps_checkpoints(job: JobContext) -> None:
    """Raise UsageError if the job has nowhere to put a checkpoint."""
    if not job.keeps_checkpoints:
        raise UsageError(
            "the job takes no checkpoints",
            fix="say where to keep them: job.checkpoint(every=..., storage=...)",
        )


def savepoint_target(job: JobContext, wish: ClientWish) -> str:
    """The directory of a new savepoint: below the one the client named, or the option.

    Raises:
        UsageError: neither says where, or it is an address of an unknown kind.
    """
    target = wish.arguments.get("savepoint") or job.options.get(SAVEPOINT_DIR)
    if not target:
        raise UsageError(
            "nobody says where savepoints go",
            fix=f"name a directory, or set {SAVEPOINT_DIR.key}",
        )
    address = savepoint_address(str(target), job.spec.name, secrets.token_hex(6))
    job.open_at(address, job.spec.options)  # not opened: only to see that it is understood
    return address


def check_rescale(job: JobContext, wanted: Any) -> tuple[int, PhysicalPlan]:
    """The parallelism to rescale to, and what runs then.

    Raises:
        UsageError: it is no such number, changes nothing, or is above the number of key groups.
    """
    if not isinstance(wanted, int) or wanted < 1:
        raise UsageError(f"not a parallelism value=`{wanted}`", fix="give a whole number from 1 on")
    plan = job.spec.replan(wanted, job.plan.max_parallelism)

    def widths(vertices: Any) -> list[tuple[str, int]]:
        return [(node.name, v.parallelism) for v in vertices for node in v.nodes]

    if sorted(widths(plan.vertices)) == sorted(widths(job.plan.vertices)):
        raise UsageError(
            f"nothing would change parallelism=`{wanted}`",
            fix="operators that set their own parallelism keep it",
        )
    return wanted, plan
