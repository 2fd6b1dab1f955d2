"""A job in a process of its own, which outlives the process that starts it."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from ...errors import HeadgateError, JobError, StorageError
from ...operators.private_directory import keep_newest, private_directory
from ..plan import JobSpec
from ..protocol import names
from ..shipping import ship

MAIN: Final = f"{__name__.split('.')[0]}.runtime.cli.detached_main"
"""The module that the process runs: `headgate run`, with a job that is handed over."""
ACCEPTED: Final = b"accepted"
LOGS_KEPT: Final = 100
"""The number of log files of processes that are kept; older ones are deleted."""
TAIL_CHARACTERS: Final = 2_000


class Payload(msgspec.Struct, frozen=True):
    """The message that the process reads from its stdin."""

    python_path: list[str]
    cluster: str
    log_level: int
    job: bytes
    """The shipped JobSpec."""


def default_log_file(job: str, run: str) -> Path:
    """Return the default log file of a detached process of this user.

    Raises:
        StorageError: the directory cannot be made.
    """
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    try:
        directory = private_directory(Path(state) / "headgate" / "logs")
    except OSError as error:
        raise StorageError(
            f"the directory of logs cannot be used path=`{state}` cause=`{error.strerror or error}`",
            fix="say where to log with --log-file, in Python log_file=",
        ) from error
    keep_newest(directory, "*.log", LOGS_KEPT - 1)
    return directory / f"{names.job_dir(job)}-{names.job_dir(run)}.log"


async def spawn(spec: JobSpec, cluster: str, log_file: Path, *, log_level: int) -> int:
    """Start the job in a process of its own; return its process id once the job has begun.

    Raises:
        HeadgateError: the job could not begin, as `launch` raises it.
    """
    payload = Payload([path for path in sys.path if path], cluster, log_level, ship(spec))
    process, answers = await asyncio.to_thread(_start, log_file)
    answer = await asyncio.to_thread(_exchange, process, answers, msgspec.msgpack.encode(payload))
    if answer == ACCEPTED:
        return process.pid
    await asyncio.to_thread(process.wait)
    if answer:
        error = pickle.loads(answer)
        raise error if isinstance(error, HeadgateError) else JobError(str(error))
    raise JobError(
        f"the detached process ended before the job began exit code=`{process.returncode}`",
        where=str(log_file),
        fix=f"its log ends like this:\n{_tail(log_file)}",
    )


def _start(log_file: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and the end of a pipe at which it answers."""
    ours, theirs = os.pipe()
    try:
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        os.close(ours)
        os.close(theirs)
        raise StorageError(f"the log file cannot be written path=`{log_file}`: {error}") from error
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", MAIN, str(theirs)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(theirs,),
            start_new_session=True,
        )
    finally:
        os.close(log)
        os.close(theirs)
    return process, ours


def _exchange(process: subprocess.Popen[bytes], answers: int, payload: bytes) -> bytes:
    assert process.stdin is not None
    try:
        process.stdin.write(payload)
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died; its log says why
    with open(answers, "rb") as pipe:
        return pipe.read()


def _tail(log_file: Path) -> str:
    try:
        return log_file.read_text(errors="replace")[-TAIL_CHARACTERS:].rstrip()
    except OSError:
        return ""
