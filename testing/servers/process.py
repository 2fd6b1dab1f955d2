"""One server process: started, known by an answer, killed, stopped and started again, and its port."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from ...operators.clock import SystemClock

P = ParamSpec("P")
START_S_MAX = 120
STOP_S_MAX = 20


class Server(Protocol):
    """A server that can be started and shut down."""

    def start(self) -> None:
        """Start it."""
        ...

    def close(self) -> None:
        """Shut it down for good."""
        ...


S = TypeVar("S", bound=Server)


class ServerProcess:
    """A server that runs as a child process and writes its output to a log file.

    Args:
        name: of the server, for errors.
        command: starts it.
        log: the file for its output, which grows over restarts.
        answers: returns True once this very server answers in its own protocol; an open port alone may
            be that of another process. It may raise OSError.
        environment: of the process; None: that of this one.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        answers: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._command = list(command)
        self._log = log
        self._answers = answers
        self._environment = None if environment is None else dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait for its answer.

        Raises:
            RuntimeError: it ended, or did not answer in time; the text has the end of its log.
        """
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=self._environment
            )
        clock = SystemClock()
        deadline = clock.monotonic() + START_S_MAX
        while clock.monotonic() < deadline and self._process.poll() is None:
            try:
                if self._answers():
                    return
            except OSError:
                pass  # it does not listen yet
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"{self._name} did not start: {self.log_end()}")

    @property
    def pid(self) -> int | None:
        """The process while it has not been ended, else None."""
        return None if self._process is None else self._process.pid

    def log_end(self) -> str:
        """Return the last part of what it has written."""
        return self._log.read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Ask it to end, and kill it if it does not."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None


class HeldPort:
    """A port of the loopback address that the operating system has handed out, kept for one server.

    The socket stays bound without listening, so nothing else gets the port before the server listens,
    and between two starts of it. Servers may share it because they set SO_REUSEADDR, as asyncio, Java and
    Go do. In a `with` statement it is the number of the port, which is held for the time of the block.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Give the port back."""
        self._socket.close()

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, *_: object) -> None:
        self.release()


class LocalServer:
    """A server process with one port; a subclass sets `_process` when it has prepared it.

    Attributes:
        port: its port on 127.0.0.1.
    """

    _process: ServerProcess

    def __init__(self) -> None:
        self._port = HeldPort()
        self.port = self._port.number

    def start(self) -> None:
        """Start it, or start it again with its data.

        Raises:
            RuntimeError: it did not come up; the text has the end of its log.
        """
        self._process.start()

    def kill(self) -> None:
        """End it at once, as a crash of the process does."""
        self._process.kill()

    def close(self) -> None:
        """Shut it down for good."""
        self._process.stop()
        self._port.release()


def runs(server: Callable[P, S]) -> Callable[P, AbstractContextManager[S]]:
    """Return a function that makes a server, and runs it for the time of a block."""

    @contextlib.contextmanager
    def running(*arguments: P.args, **named: P.kwargs) -> Iterator[S]:
        made = server(*arguments, **named)
        try:
            made.start()
            yield made
        finally:
            made.close()

    return running
