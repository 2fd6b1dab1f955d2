"""Runs a task with Spark in a process of its own, and cleans up after both."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ...errors import SourceError, UsageError
from ...operators.private_directory import private_directory
from .java import check_pyspark, find_java
from .task import SIZE, Done, Failed, Message, Progress, Task

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
_MEMORY: Final = (
    'there may have been too little memory: conf={"spark.driver.memory": "4g"} gives more; '
    "the log shows what Spark did last"
)


class SparkProcess:
    """One process for one task. `run` blocks; `kill` may be called from another thread.

    Args:
        task: the task, whose `scratch` is set here.
        directory: the directory for temporary files; empty: that of the system.
        where: the user's line, for errors.
        announce: called with every sign of progress, in the thread of `run`.
    """

    def __init__(
        self, task: Task, directory: str, where: str, announce: Callable[[str], None]
    ) -> None:
        self._task = task
        self._where = where
        self._announce = announce
        self._root = Path(directory or tempfile.gettempdir()) / f"headgate-spark-{os.getuid()}"
        self.log = self._root / f"{_UNSAFE.sub('-', task.name)}.log"
        """The file for Spark's warnings and errors. Each process of this name overwrites it."""
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def run(self) -> Done:
        """Start the process, wait for its end, and clean up.

        Raises:
            UsageError: Spark or Java is not installed, or the query is wrong as written.
            SourceError: the process failed, or died.
        """
        check_pyspark()
        try:
            private_directory(self._root)
        except OSError as error:
            raise UsageError(
                f"the directory for Spark's files cannot be used path=`{self._root}` "
                f"cause=`{error.strerror or error}`",
                where=self._where,
                fix="set TMPDIR, or the source's directory, to a directory of your own",
            ) from error
        scratch = Path(tempfile.mkdtemp(prefix=f"{self.log.stem}-", dir=self._root))
        try:
            return self._run(scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def kill(self) -> None:
        """End the process now, with all processes that it has started. `run` then raises."""
        self._killed = True
        if self._process is not None:
            _kill(self._process)

    def _run(self, scratch: Path) -> Done:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        }
        if not self._task.plan.master.startswith("sc://"):
            environment["JAVA_HOME"] = find_java().home_for_spark(scratch)
        self._announce(f"starting Spark on {self._task.plan.master}; its log is {self.log}")
        with open(self.log, "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "headgate.connectors.spark.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                # It gets a process group of its own, so that Java is killed with it.
                start_new_session=True,
            )
        self._process = process
        try:
            if self._killed:
                raise self._ended(None)
            return self._talk(process, scratch)
        finally:
            # This comes before `wait`: the number of a process is not reused before it has been waited
            # for.
            _kill(process)
            process.wait()
            self._process = None
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None  # for the type checker
                    pipe.close()

    def _talk(self, process: subprocess.Popen[bytes], scratch: Path) -> Done:
        """Give the process its task, and read messages until the answer."""
        assert process.stdin is not None  # for the type checker: both are pipes
        assert process.stdout is not None
        task = msgspec.msgpack.encode(msgspec.structs.replace(self._task, scratch=str(scratch)))
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(SIZE.pack(len(task)) + task)
            process.stdin.flush()
        for line in process.stdout:
            match msgspec.json.decode(line, type=Message):
                case Progress(text):
                    self._announce(text)
                case Done() as done:
                    return done
                case Failed() as failed:
                    raise self._failure(failed)
        raise self._ended(process)

    def _failure(self, failed: Failed) -> UsageError | SourceError:
        if failed.usage:
            return UsageError(failed.message, where=self._where, fix=failed.fix)
        fix = failed.fix or f"Spark's log is {self.log}"
        return SourceError(failed.message, where=self._where, fix=fix, detail=failed.detail)

    def _ended(self, process: subprocess.Popen[bytes] | None) -> SourceError:
        if self._killed or process is None:
            return SourceError("Spark was stopped before it was done", where=self._where)
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        status = end.si_status if end is not None else 0
        return SourceError(
            f"the process of Spark ended without a result status=`{status}` log=`{self.log}`",
            where=self._where,
            fix=_MEMORY,
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
