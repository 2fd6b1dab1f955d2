"""Ports and hosts of a job are the configured ones, and an error about a port names its option."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import Pause, blackhole, from_list
from headgate.errors import ClusterError, JobError, OptionError
from headgate.runtime.cluster.launch import launch
from headgate.runtime.control.job_client import JobClient
from headgate.runtime.control.link import ControlServer
from headgate.runtime.exchange.hub import ExchangeHub
from headgate.runtime.job import runnable
from headgate.runtime.listening import Listener, worker_metrics_port
from headgate.runtime.options.registry import Options
from headgate.tests.support.launched import while_running

AT_ONCE = {"headgate.listener.port-patience": "0 ms"}


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in an event loop."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Taken:
    """Ports that listen, next to ports that are free."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def free(self, count: int, *, taken: int = 0, host: str = "127.0.0.1") -> range:
        """Neighbouring ports, of which the first `taken` are taken and the others free."""
        for first in range(20_011, 32_000, count):
            ports = range(first, first + count)
            opened = [socket.socket() for _ in ports]
            try:
                for one, port in zip(opened, ports, strict=True):
                    one.bind((host, port))
            except OSError:
                for one in opened:
                    one.close()
                continue
            for one in opened[taken:]:
                one.close()
            for one in opened[:taken]:
                one.listen()
            self._sockets += opened[:taken]
            return ports
        raise AssertionError("no free ports")

    def close(self) -> None:
        """Free what is taken."""
        for one in self._sockets:
            one.close()
        self._sockets.clear()


@pytest.fixture
def ports() -> Iterator[Taken]:
    made = Taken()
    yield made
    made.close()


def control(**texts: str) -> Listener:
    return Listener.control(Options(AT_ONCE | texts))


def data(**texts: str) -> Listener:
    return Listener.data(Options(AT_ONCE | texts))


def text(ports: range) -> str:
    return f"{ports[0]}-{ports[-1]}"


async def _nobody(*_: Any) -> None:
    return None


async def control_address(listener: Listener, node_host: str = "127.0.0.1") -> str:
    server = ControlServer("token", _nobody, listener=listener)
    await server.listen(None, node_host)
    await server.close()
    return server.addresses[0]


# -- the texts of the options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "ports"),
    [("0", range(1)), ("6121", range(6121, 6122)), (" 6121 - 6140 ", range(6121, 6141))],
)
def test_a_port_or_a_range(written: str, ports: range) -> None:
    assert data(**{"taskmanager.data.port": written}).ports == ports


@pytest.mark.parametrize("written", ["-1", "x", "65536", "0-5", "9-5", "5-", "1-2-3", ""])
def test_what_is_no_port(written: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options({"taskmanager.data.port": written})
    assert "taskmanager.data.port" in caught.value.message


@pytest.mark.parametrize("key", ["jobmanager.rpc.address", "taskmanager.host"])
def test_nobody_connects_to_a_wildcard(key: str) -> None:
    with pytest.raises(OptionError, match="nobody can connect") as caught:
        Options({key: "0.0.0.0"})
    assert key in caught.value.message


def test_a_standby_needs_a_port_of_its_own() -> None:
    standby = {"headgate.coordinator.standby": "1"}
    Options(standby)
    Options(standby | {"jobmanager.rpc.port": "6070-6071"})
    with pytest.raises(OptionError, match="too few") as caught:
        Options(standby | {"jobmanager.rpc.port": "6070"})
    assert "6070-6071" in caught.value.fix


# -- hosts ---------------------------------------------------------------------------------------------

POD = "10.1.2.3"


@pytest.mark.parametrize(
    ("texts", "hosts"),
    [
        ({}, (POD, POD)),
        ({"jobmanager.bind-host": "0.0.0.0"}, ("0.0.0.0", POD)),
        ({"jobmanager.bind-host": "10.9.9.9"}, ("10.9.9.9", "10.9.9.9")),
        ({"jobmanager.rpc.address": "head.example"}, (POD, "head.example")),
        ({"jobmanager.rpc.address": "env:HG_TEST_IP"}, (POD, "10.7.7.7")),
    ],
)
def test_what_is_bound_and_what_peers_are_told(
    texts: dict[str, str], hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HG_TEST_IP", "10.7.7.7")
    assert control(**texts).hosts(POD) == hosts


def test_a_host_of_an_environment_variable_that_is_not_set() -> None:
    with pytest.raises(OptionError, match="HG_NOT_SET") as caught:
        data(**{"taskmanager.host": "env:HG_NOT_SET"}).hosts()
    assert "taskmanager.host" in caught.value.message


# -- both kinds of listener, with sockets --------------------------------------------------------------


@in_loop
async def test_the_control_port_is_bound_to_all_and_advertised_as_the_node(ports: Taken) -> None:
    (port,) = ports.free(1)
    listener = control(**{"jobmanager.rpc.port": str(port), "jobmanager.bind-host": "0.0.0.0"})
    server = ControlServer("token", _nobody, listener=listener)
    await server.listen(None, POD)
    assert server.addresses == [f"tcp:{POD}:{port}"]
    _, writer = await asyncio.open_connection("127.0.0.2", port)  # not only 127.0.0.1 is bound
    writer.close()
    await server.close()


@in_loop
async def test_the_data_port_is_bound_to_all_and_advertised_as_set(ports: Taken) -> None:
    (port,) = ports.free(1)
    hub = ExchangeHub(
        "w",
        "token",
        listener=data(
            **{
                "taskmanager.data.port": str(port),
                "taskmanager.bind-host": "0.0.0.0",
                "taskmanager.host": "worker.example",
            }
        ),
    )
    address = await hub.start(None)
    assert (address.host, address.tcp_port) == ("worker.example", port)
    _, writer = await asyncio.open_connection("127.0.0.2", port)
    writer.close()
    await hub.close()


@in_loop
async def test_the_next_port_of_a_range_is_tried(ports: Taken) -> None:
    found = ports.free(3, taken=2)
    assert await control_address(control(**{"jobmanager.rpc.port": text(found)})) == (
        f"tcp:127.0.0.1:{found[2]}"
    )
    hub = ExchangeHub("w", "token", listener=data(**{"taskmanager.data.port": text(found)}))
    assert (await hub.start(None)).tcp_port == found[2]
    await hub.close()


@pytest.mark.parametrize("count", [1, 2])
@in_loop
async def test_taken_ports_are_an_error_with_option_and_port(ports: Taken, count: int) -> None:
    found = ports.free(count, taken=count)
    written = str(found[0]) if count == 1 else text(found)
    with pytest.raises(JobError) as caught:
        await control_address(control(**{"jobmanager.rpc.port": written}))
    assert f"option=`jobmanager.rpc.port` port=`{written}`" in caught.value.message
    hub = ExchangeHub("w", "token", listener=data(**{"taskmanager.data.port": written}))
    with pytest.raises(JobError) as caught:
        await hub.start(None)
    assert f"option=`taskmanager.data.port` port=`{written}`" in caught.value.message
    await hub.close()


@in_loop
async def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(JobError) as caught:
        await control_address(control(**{"jobmanager.bind-host": "192.0.2.1"}))
    assert "option=`jobmanager.bind-host` host=`192.0.2.1`" in caught.value.message


@in_loop
async def test_a_port_that_becomes_free_is_taken(ports: Taken) -> None:
    """That of a process which was killed is still taken for a moment."""
    (port,) = ports.free(1, taken=1)
    tried = 0

    async def open_server(host: str, port: int) -> asyncio.AbstractServer:
        nonlocal tried
        tried += 1
        if tried == 2:
            ports.close()
        return await asyncio.start_server(_nobody, host, port)

    patient = Listener.control(
        Options({"jobmanager.rpc.port": str(port), "headgate.listener.port-patience": "1 h"})
    )
    server, _, opened = await patient.open(open_server)
    assert (opened, tried) == (port, 2)
    server.close()


# -- metrics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("addresses", "port"),
    [
        (["unix:/run/a.sock", f"tcp:{POD}:6070"], 9465),
        (["unix:/run/a.sock", "tcp:10.1.2.4:6070"], 9464),
    ],
)
def test_only_workers_next_to_the_coordinator_leave_its_metrics_port_free(
    addresses: list[str], port: int
) -> None:
    assert worker_metrics_port(9464, addresses, POD) == port
    assert worker_metrics_port(0, addresses, POD) == 0
    assert worker_metrics_port(None, addresses, POD) is None


# -- whole jobs ----------------------------------------------------------------------------------------


def make_job(parallelism: int, **texts: str) -> hg.Job:
    job = hg.Job("ports", parallelism=parallelism, options=AT_ONCE | texts)
    records = job.read(from_list([1, 2, Pause("1h")]), name="numbers")
    records.rebalance().map(lambda value: value + 1, name="plus").write(blackhole(), name="out")
    return job


@pytest.mark.parametrize("cluster", ["in-process", pytest.param("local", marks=pytest.mark.ray)])
def test_a_job_listens_at_its_ports_only(
    cluster: str, ports: Taken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path / "run"))
    found = ports.free(4, taken=1)
    job = make_job(
        2,
        **{
            "jobmanager.rpc.port": str(found[1]),
            "taskmanager.data.port": text(found),
            "taskmanager.bind-host": "0.0.0.0",
        },
    )

    async def script(client: JobClient) -> None:
        workers = 1 if cluster == "in-process" else 2
        for port in found[1 : 2 + workers]:  # the control port, and the next ones for the workers
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()

    asyncio.run(while_running(job, cluster, script))


@pytest.mark.parametrize(
    ("key", "cluster"),
    [
        ("jobmanager.rpc.port", "in-process"),
        ("taskmanager.data.port", "in-process"),
        pytest.param("jobmanager.rpc.port", "local", marks=pytest.mark.ray),
        pytest.param("taskmanager.data.port", "local", marks=pytest.mark.ray),
    ],
)
def test_a_job_whose_port_is_taken_says_so(
    key: str, cluster: str, ports: Taken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path / "run"))
    (port,) = ports.free(1, taken=1)
    job = make_job(1, **{key: str(port), "restart-strategy.type": "none"})
    run = partial(launch, runnable(job).spec(), cluster)
    if key == "jobmanager.rpc.port":
        with pytest.raises(JobError) as caught:
            asyncio.run(run())
        error: BaseException | None = caught.value
    else:
        error = asyncio.run(run()).error
        assert isinstance(error, ClusterError)
    assert f"option=`{key}` port=`{port}`" in str(error)


def test_too_few_data_ports_for_one_machine_are_refused_before_the_start() -> None:
    job = make_job(3, **{"taskmanager.data.port": "6121-6122"})
    with pytest.raises(OptionError, match="too few data ports") as caught:
        asyncio.run(launch(runnable(job).spec(), "local"))
    assert "6121-6123" in caught.value.fix


def test_subtasks_of_one_process_share_a_worker_and_its_port(ports: Taken) -> None:
    (port,) = ports.free(1)
    job = make_job(3, **{"taskmanager.data.port": str(port)})

    async def script(client: JobClient) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()

    asyncio.run(while_running(job, "in-process", script))
