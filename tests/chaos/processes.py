"""The processes of a job, and the resources they hold."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

CONTROL_STORE = "control store"
ROLES = {
    "ray::WorkerActor": "worker",
    "ray::CoordinatorActor": "coordinator",
    "ray::IDLE": "starting",
    "raylet": "raylet",
    "gcs_server": CONTROL_STORE,
}
DRIVER, OTHER = "command", "others of Ray"


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    at_s: float
    role: str
    pid: int
    age_s: float
    rss_bytes: int
    descriptors: int


def of_session(session: int) -> list[psutil.Process]:
    """The living processes of a session, regardless of their parents.

    Ray's processes stay in the session of the process that started Ray, and sessions outlive parents.
    """
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getsid(pid) == session:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return sorted(found, key=psutil.Process.create_time)


def role_of(process: psutil.Process, driver: int) -> str:
    """Return the role of a process in a job whose `headgate run` is process `driver`."""
    if process.pid == driver:
        return DRIVER
    with contextlib.suppress(psutil.Error):
        name = Path((process.cmdline() or [""])[0]).name
        for start, role in ROLES.items():
            if name.startswith(start):
                return role
    return OTHER


def title(process: psutil.Process) -> str:
    """Return the name that the system has for it."""
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:100]}"
    return f"{process.pid}"


def sample(driver: int, at_s: float) -> list[Sample]:
    """All processes of a job."""
    found = []
    for process in of_session(driver):
        with contextlib.suppress(psutil.Error), process.oneshot():
            age_s = time.time() - process.create_time()
            memory, files = process.memory_info().rss, process.num_fds()
            role = role_of(process, driver)
            found.append(Sample(at_s, role, process.pid, age_s, memory, files))
    return found


def with_role(driver: int, role: str) -> list[int]:
    """Process ids, oldest first."""
    found = [p for p in of_session(driver) if role_of(p, driver) == role]
    return [process.pid for process in found]


def send(pid: int, number: signal.Signals) -> bool:
    """False if the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def files_below(directory: Path) -> int:
    """Return the number of entries; it is approximate if the directory changes meanwhile."""
    return sum(len(files) for _, _, files in os.walk(directory))
