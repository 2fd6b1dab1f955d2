"""The options of workers' places on an existing Ray cluster; `options.py` has the others."""

from __future__ import annotations

from typing import Any, Final

from .option_types import Choice, Option, Text
from .protocol.worker_nodes import ALLOWED, IF_ALONE, NEVER

SLOT_RESOURCE = Option[str | None](
    "headgate.ray.slot-resource",
    Text(),
    None,
    "",
    "Name of a custom resource of Ray. A worker on an existing Ray cluster takes one of it for each of its "
    "slots, so that a node hosts as many slots as it was started with; workers wait until there is enough. "
    "Unset: workers take no resources of Ray.",
)
WORKERS_ON_HEAD = Option[str](
    "headgate.ray.workers-on-head",
    Choice((NEVER, IF_ALONE, ALLOWED)),
    IF_ALONE,
    "",
    "Whether workers may run on the head node of an existing Ray cluster: never, only as long as it is the "
    "cluster's only node, or like on any other node. With `never` they wait for other nodes.",
)
RAY_OPTIONS: Final[tuple[Option[Any], ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Option)
)
