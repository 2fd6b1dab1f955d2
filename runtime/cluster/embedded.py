"""The embedded Ray: started by us, quiet, on loopback only, and gone without a trace afterwards.

The settings were measured (docs/design/0003-ray-places-processes.md). Two are not obvious: Ray ignores
a loopback node address unless `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0`, and its usage report is only
surely silent with an address that leads nowhere.

Without its raylet or its control store no worker can be started again. Ray would let the job wait for
ever in the first case, and end this process without a word after a minute in the second: so
`while_ray_lives` looks at these processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ...errors import JobError, UsageError
from ...operators.private_directory import own_directory

_log = logging.getLogger("headgate.cluster")
OBJECT_STORE_BYTES = 80 << 20
"""The size of Ray's object store; records never pass through it."""
CPUS = 64
"""The number of CPUs that Ray is told, so that it never queues an actor: our actors ask for no CPUs."""

_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",
}
CHECK_EVERY_S = 1.0
VITAL = frozenset({"raylet", "gcs_server"})
_T = TypeVar("_T")


def prepare_environment() -> None:
    """Set what Ray reads while it is imported; so call this before anything imports ray.

    Raises:
        UsageError: something has, without these settings: what Ray starts could not be reached.
    """
    unset = {key: value for key, value in _ENVIRONMENT.items() if os.environ.get(key) != value}
    if unset and "ray" in sys.modules:
        raise UsageError(
            "this process has imported ray before the job was started, without the settings of a Ray of "
            "its own",
            fix="import ray later, in the functions that need it; or name a cluster that runs already; or "
            f"set RAY_AUTH_TOKEN and {' '.join(f'{key}={value}' for key, value in unset.items())} before",
        )
    os.environ.update(_ENVIRONMENT)
    # Ray's own choice is 15. The job is what this machine is to do, and heartbeats are part of it.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextlib.contextmanager
def embedded_ray() -> Iterator[str]:
    """Start a Ray of our own for the time of the block; `prepare_environment` came before.

    Yields its temporary directory.
    """
    import ray

    _hush()
    with own_directory(Path(tempfile.gettempdir()), "hg-ray-") as directory:
        # Ray opens the directory it is given to all users. The one around it is ours, and keeps them out.
        rays = directory / "r"
        try:
            _start(rays)
            yield str(directory)
        finally:
            ray.shutdown()


def _start(directory: Path) -> None:
    """Start Ray's processes, which have their files in `directory`.

    Raises:
        JobError: they did not start.
    """
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=CPUS,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=True,
            object_store_memory=OBJECT_STORE_BYTES,
            namespace="headgate",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(directory),
        )
    except Exception as error:
        # Ray has no class for this: it raises RuntimeError, TimeoutError, OSError and others.
        raise JobError(
            f"the embedded Ray did not start: {type(error).__name__}: {error}",
            fix="run the job again when the machine is less busy and has memory and disk space to "
            "spare; --cluster in-process needs no Ray",
        ) from error


def _hush() -> None:
    """Log what the raylet says of dead workers instead of printing it amid the job's own output.

    The coordinator reports each death itself. Ray has no setting for this: the function is private, and
    where a release has none the lines merely show up.
    """
    worker = sys.modules.get("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):

        def to_log(data: dict[str, Any], ignore_prefix: bool) -> None:
            for line in data.get("lines", ()):
                _log.debug("ray: %s", line)

        setattr(worker, "print_to_stdstream", to_log)  # noqa: B010  not a declared attribute


async def while_ray_lives(doing: Coroutine[None, None, _T]) -> _T:
    """Return the result of `doing`.

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
    """Return the name of a process that Ray started for this one and that is gone; empty if none is.

    Ray has no public function for this. Where a release lacks the private one, a death is not noticed.
    """
    node: Any = getattr(sys.modules.get("ray._private.worker"), "_global_node", None)
    if not hasattr(node, "dead_processes"):
        return ""
    return next((kind for kind, _ in node.dead_processes() if kind in VITAL), "")
