"""`headgate run --cluster ADDRESS` when there is no Ray at that address."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from headgate.errors import UsageError
from headgate.runtime.cluster import connect
from headgate.testing.servers.process import HeldPort
from headgate.tests.support.commands import ended_with

NOTHING = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: nothing}
spec:
  sources: {ticks: {generator: {fields: {n: sequence}, rows: 10}}}
  sinks: {out: {from: ticks, blackhole: {}}}
"""


class Silent:
    """A port that takes connections and says nothing, on all addresses of this machine."""

    def __init__(self) -> None:
        self._server = socket.create_server(("0.0.0.0", 0))
        self.port = self._server.getsockname()[1]
        self.called = threading.Semaphore(0)
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._held.append(self._server.accept()[0])
            except OSError:
                return
            self.called.release()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for connection in self._held:
            connection.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    server = Silent()
    yield server
    server.close()


@pytest.mark.parametrize("form", ["localhost:{}", "ray://127.0.0.1:{}"])
def test_nothing_listens_at_the_address(cli, form: str) -> None:
    with HeldPort() as port:  # it does not listen, and nobody else does there
        address = form.format(port)
        ended = cli("run", cli.write("nothing.yaml", NOTHING), "--cluster", address)
    ended_with(ended, 1)
    assert f"no Ray cluster listens there address=`{address}`" in ended.stderr
    assert "ray start --head" in ended.stderr


def test_what_listens_there_does_not_answer(cli, silent: Silent) -> None:
    address = f"localhost:{silent.port}"
    options = ("-D", "headgate.cluster.connect-timeout=500ms")
    ended = cli("run", cli.write("nothing.yaml", NOTHING), "--cluster", address, *options)
    ended_with(ended, 1)
    assert f"did not answer within 500ms address=`{address}`" in ended.stderr
    assert "headgate.cluster.connect-timeout gives it more time" in ended.stderr


def test_one_interrupt_ends_the_waiting_for_a_cluster(cli, silent: Silent) -> None:
    """Ray waits in a thread: the process hears signals, and nothing has begun that could be stopped."""
    options = ("-D", "headgate.cluster.connect-timeout=1h")
    address = f"localhost:{silent.port}"
    run = cli.start("run", cli.write("nothing.yaml", NOTHING), "--cluster", address, *options)
    for _ in range(2):  # the first look at the port, then Ray
        assert silent.called.acquire(timeout=60)
    run.interrupt()
    code, text = run.end()
    assert code == 130
    assert "job nothing cancelled before it began" in text


@pytest.mark.parametrize("address", ["here:", "here:port", ":6379", "ray://", "ray://here", "h:0"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageError, match="not the address of a Ray cluster"):
        asyncio.run(connect.connect_to_cluster(address, "headgate", 60_000))


def test_a_cluster_that_comes_when_nobody_waits_any_more_is_left(
    monkeypatch: pytest.MonkeyPatch, silent: Silent
) -> None:
    late, left = threading.Event(), threading.Event()
    monkeypatch.setattr(connect.ray, "init", lambda **_: late.wait())
    monkeypatch.setattr(connect.ray, "shutdown", left.set)

    async def scenario() -> None:
        address = f"localhost:{silent.port}"
        connecting = asyncio.create_task(connect.connect_to_cluster(address, "headgate", 60_000))
        while not any(  # noqa: ASYNC110  as simple as can be
            thread.name == "connect to Ray" for thread in threading.enumerate()
        ):
            await asyncio.sleep(0.01)
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)

    asyncio.run(scenario())
    assert not left.is_set()
    late.set()
    assert left.wait(60)
