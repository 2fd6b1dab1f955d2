"""The interface of a cluster: it starts workers, reports their deaths, and kills them."""

from __future__ import annotations

from typing import Protocol

from .link import ControlLink


class ControlEndpoint(Protocol):
    """The address and secret with which workers report."""

    @property
    def addresses(self) -> list[str]:
        """The addresses to try in order: `unix:<path>` for the same host, then `tcp:<host>:<port>`."""
        ...

    @property
    def token(self) -> str:
        """The secret a worker must show."""
        ...

    def accept(self, link: ControlLink) -> None:
        """Serve a link that was made within this process."""
        ...


class WorkerHandle(Protocol):
    """A started worker."""

    @property
    def worker_id(self) -> str: ...

    async def died(self) -> str:
        """Return, with the reason, once the worker is gone for good."""
        ...

    def kill(self, pid: int = 0) -> None:
        """Kill it at once (`kill -9`); `died` returns then. Safe to call twice.

        Args:
            pid: its process id, if it runs on this host; with it a stopped process is killed too.
        """
        ...


class Cluster(Protocol):
    """Starts workers."""

    async def start_worker(
        self, worker_id: str, control: ControlEndpoint, group: str
    ) -> WorkerHandle:
        """Start a worker for a slot sharing group that connects to `control` and says Hello.

        Raises:
            JobError: the cluster has no room, or refuses.
        """
        ...

    async def find_worker(self, worker_id: str, control: ControlEndpoint) -> WorkerHandle | None:
        """Let a worker that another coordinator started connect to `control` as well, and send Hello.

        Return None if there is no such worker, or it cannot be asked.
        """
        ...

    async def close(self) -> None:
        """Stop everything that this cluster started, and leave nothing behind."""
        ...
