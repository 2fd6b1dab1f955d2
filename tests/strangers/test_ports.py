"""A hostile neighbour at every port of a job: it has no token, and gets little memory, time and room.

Each test speaks to a real listener through raw sockets, as another user of the machine could.
"""

from __future__ import annotations

import asyncio
import socket
import stat
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headgate.k8s.operator.endpoints import serving as serving_operator
from headgate.k8s.worker_process import Node, probes
from headgate.operators.clock import SystemClock
from headgate.runtime.control.job_client import Subscriber
from headgate.runtime.control.link import ControlLink, ControlServer, StreamLink, connect
from headgate.runtime.control.messages import Heartbeat, Hello, encode
from headgate.runtime.exchange import links
from headgate.runtime.exchange.hub import ExchangeHub
from headgate.runtime.exchange.wire import HEADER, WIRE_VERSION, FrameKind, frame
from headgate.runtime.listening import GREETING_BYTES_MAX, Admission, ListenerLimits
from headgate.runtime.observe.endpoint import open_endpoint
from headgate.runtime.observe.metrics import MetricsRegistry
from headgate.runtime.options.registry import Options
from headgate.runtime.rest.routes import ROUTES
from headgate.runtime.rest.server import RestServer
from headgate.testing.servers.process import HeldPort

TOKEN = "secret"
PATIENT = ListenerLimits(handshake_timeout_ms=600_000)
"""A peer that is hung up on under these limits was not hung up on for want of time."""
FEW = ListenerLimits(handshake_timeout_ms=600_000, unauthenticated_max=3)
HASTY = ListenerLimits(handshake_timeout_ms=100)
MORE_THAN_SOCKETS_HOLD = "x" * 50_000_000
"""Linux lets a pair of sockets hold up to 4 MiB on one side and 32 MiB on the other."""
GUARD_S = 300.0
"""A test that waits for something that never comes ends after this."""


class Port:
    """One listener, and what is special about its protocol."""

    def __init__(self, address: tuple[str, int] | str) -> None:
        self.address = address

    async def stranger(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self.address, str):
            return await asyncio.open_unix_connection(self.address)
        return await asyncio.open_connection(*self.address)


@asynccontextmanager
async def control(limits: ListenerLimits, unix: Path | None = None) -> AsyncIterator[Port]:
    async def serve(hello: Hello, link: ControlLink) -> None:
        link.send(Heartbeat())
        while await link.receive() is not None:
            link.send(Heartbeat())

    server = ControlServer(TOKEN, serve, limits)
    await server.listen(None if unix is None else str(unix))
    address = server.addresses[0]
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    yield Port(rest if kind == "unix" else (host, int(port)))
    await server.close()


@asynccontextmanager
async def data(limits: ListenerLimits, unix: Path | None = None) -> AsyncIterator[Port]:
    hub = ExchangeHub("w", TOKEN, limits=limits)
    address = await hub.start(None if unix is None else str(unix.parent))
    yield Port(address.uds_path or ("127.0.0.1", address.tcp_port))
    await hub.close()


@asynccontextmanager
async def metrics(limits: ListenerLimits, unix: Path | None = None) -> AsyncIterator[Port]:
    endpoint = open_endpoint(MetricsRegistry(), 0, "127.0.0.1", limits)
    assert endpoint is not None
    yield Port(("127.0.0.1", endpoint.port))
    await asyncio.to_thread(endpoint.close)


class NoJob:
    """Stands in for the coordinator behind the REST API."""

    def view(self, verb: str, **arguments: Any) -> dict[str, Any]:
        return {"name": "headgate-job", "status": "RUNNING"}

    async def ask(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError(f"a stranger began an operation {verb} {arguments}")

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        return lambda: None


@asynccontextmanager
async def rest(
    limits: ListenerLimits, unix: Path | None = None, **options: str
) -> AsyncIterator[Port]:
    texts = {
        "rest.port": "0",
        "headgate.listener.handshake-timeout": f"{limits.handshake_timeout_ms} ms",
        "headgate.listener.unauthenticated-max": str(limits.unauthenticated_max),
        "headgate.listener.connections-max": str(limits.connections_max),
    }
    server = RestServer(NoJob(), TOKEN, Options({**texts, **options}), SystemClock())
    if unix is not None:
        await server.listen_unix(str(unix))
        yield Port(str(unix))
    else:
        await server.listen()
        yield Port(("127.0.0.1", int(server.url.rpartition(":")[2])))
    await server.close()


@asynccontextmanager
async def operator_health(limits: ListenerLimits, unix: Path | None = None) -> AsyncIterator[Port]:
    with HeldPort() as health, HeldPort() as scraped:
        async with serving_operator("127.0.0.1", health, scraped, list, bytes, limits=limits):
            yield Port(("127.0.0.1", health))


@asynccontextmanager
async def operator_metrics(limits: ListenerLimits, unix: Path | None = None) -> AsyncIterator[Port]:
    with HeldPort() as health, HeldPort() as scraped:
        async with serving_operator("127.0.0.1", health, scraped, list, bytes, limits=limits):
            yield Port(("127.0.0.1", scraped))


@asynccontextmanager
async def worker_probes(limits: ListenerLimits, unix: Path | None = None) -> AsyncIterator[Port]:
    with HeldPort() as port:
        async with probes(Node(grace_s=0), "127.0.0.1", port, limits):
            yield Port(("127.0.0.1", port))


OF_PODS = [operator_health, operator_metrics, worker_probes]
"""The ports that ask for no token: probes of Kubernetes and the metrics of the operator."""
LISTENERS = [control, data, metrics, rest, *OF_PODS]
HUGE = {
    control: struct.pack("<I", 1 << 30),
    data: HEADER.pack(1 << 30, FrameKind.HELLO, 0, 0, 0, 0),
    metrics: b"GET /metrics HTTP/1.1\r\nX-Long: ",
    rest: b"GET /v1/job HTTP/1.1\r\nX-Long: ",
    operator_health: b"GET /healthz HTTP/1.1\r\nX-Long: ",
    operator_metrics: b"GET /metrics HTTP/1.1\r\nX-Long: ",
    worker_probes: b"GET /healthz HTTP/1.1\r\nX-Long: ",
}
"""The first bytes of a stranger who has a lot to say."""
Listener = Callable[..., Any]


def run(scenario: Any) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(GUARD_S):
            await scenario

    asyncio.run(guarded())


async def is_hung_up_on(reader: asyncio.StreamReader) -> bytes:
    """Waits for the end of the connection; returns what was said before."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize("listener", [control, data, rest])
def test_other_users_cannot_connect_to_unix_sockets(listener: Listener, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with listener(PATIENT, tmp_path / "s.sock"):
            (path,) = (each for each in tmp_path.iterdir() if each.is_socket())
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert list(tmp_path.iterdir()) == []

    run(scenario())


@pytest.mark.parametrize("unix", [False, True])
@pytest.mark.parametrize("listener", LISTENERS)
def test_a_length_is_not_believed_before_the_token(
    listener: Listener, unix: bool, tmp_path: Path
) -> None:
    if listener in (metrics, *OF_PODS) and unix:
        pytest.skip("it has no Unix socket")

    async def scenario() -> None:
        async with listener(PATIENT, tmp_path / "s.sock" if unix else None) as port:
            reader, writer = await port.stranger()
            # More bytes than are buffered on the way, and than a stranger may send.
            writer.write(HUGE[listener] + b"x" * (2 * GREETING_BYTES_MAX))
            assert b"headgate" not in await is_hung_up_on(reader)
            writer.close()

    run(scenario())


@pytest.mark.parametrize("listener", LISTENERS)
def test_strangers_who_say_nothing_are_hung_up_on(listener: Listener) -> None:
    async def scenario() -> None:
        async with listener(HASTY) as port:
            reader, writer = await port.stranger()
            await is_hung_up_on(reader)
            writer.close()

    run(scenario())


@pytest.mark.parametrize("listener", LISTENERS)
def test_saying_a_little_now_and_then_buys_no_time(listener: Listener) -> None:
    """The time is that of the whole greeting, not that between two of its bytes."""

    async def scenario() -> None:
        async with listener(HASTY) as port:
            reader, writer = await port.stranger()
            end = asyncio.ensure_future(is_hung_up_on(reader))
            begun = {control: b"\xff\0\0\0", data: HEADER.pack(255, FrameKind.HELLO, 0, 0, 0, 0)}
            writer.write(begun.get(listener, b"GET /"))
            while not end.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)
            writer.close()

    run(scenario())


@pytest.mark.parametrize("listener", LISTENERS)
def test_when_too_many_wait_the_oldest_is_closed(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with listener(FEW) as port:
            strangers = [await port.stranger() for _ in range(5)]
            for reader, _ in strangers[:2]:
                await is_hung_up_on(reader)
            assert not any(reader.at_eof() for reader, _ in strangers[2:])
            for _, writer in strangers:
                writer.close()

    run(scenario())
    assert "too many connections" in caplog.text
    assert "unauthenticated_max=`3`" in caplog.text


@pytest.mark.parametrize("noise", [b"", b"x", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n"])
@pytest.mark.parametrize("listener", [control, data])
def test_a_thousand_strangers_do_not_keep_a_friend_out(listener: Listener, noise: bytes) -> None:
    """Each of them comes while earlier ones hold their connections open."""

    async def scenario() -> None:
        async with listener(FEW) as port:
            held = []
            for _ in range(1000):
                _, writer = await port.stranger()
                writer.write(noise)
                held.append(writer)
            assert await is_welcome(port, listener)
            for writer in held:
                writer.close()

    run(scenario())


@pytest.mark.parametrize("noise", [b"", b"GET /healthz HTTP/1.1\r\nHost: "])
@pytest.mark.parametrize(
    ("listener", "path"),
    [(operator_health, "/healthz"), (operator_metrics, "/metrics"), (worker_probes, "/healthz")],
)
def test_half_sent_requests_do_not_keep_a_probe_out(
    listener: Listener, path: str, noise: bytes
) -> None:
    async def scenario() -> None:
        async with listener(FEW) as port:
            held = []
            for _ in range(100):
                stranger = await port.stranger()
                stranger[1].write(noise)
                held.append(stranger)
            for reader, _ in held[:-3]:
                await is_hung_up_on(reader)
            # The answer ends the connection, so none of its time is left for another request.
            answer = await said(port, request("GET", path))
            assert status_of(answer) == 200
            assert b"\r\nConnection: close\r\n" in answer
            for _, writer in held:
                writer.close()

    run(scenario())


async def is_welcome(port: Port, listener: Listener, token: str = TOKEN) -> bool:
    """True if a peer that shows `token` is let in."""
    reader, writer = await port.stranger()
    if listener is control:
        link = StreamLink(reader, writer)
        link.send(Hello(token=token, role="client"))
        answer = await link.receive()
        link.close()
        return isinstance(answer, Heartbeat)
    hello = links.ChannelHello(WIRE_VERSION, token, "a", "w", 1)
    writer.writelines(frame(FrameKind.HELLO, msgspec.msgpack.encode(hello)))
    said = await is_hung_up_on(reader)
    writer.close()
    # No attempt runs at this worker; only a peer with the token is told.
    return b"another attempt runs here" in said


@pytest.mark.parametrize("listener", [control, data])
@pytest.mark.parametrize("token", ["", "secre", "secret ", "sécret", "x" * 4096])
def test_a_wrong_token_learns_nothing(listener: Listener, token: str) -> None:
    async def scenario() -> None:
        async with listener(PATIENT) as port:
            assert not await is_welcome(port, listener, token)
            assert await is_welcome(port, listener)

    run(scenario())


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `hmac.compare_digest`, at both ports: a plain comparison never calls it."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)

    async def scenario() -> None:
        for listener in (control, data):
            async with listener(PATIENT) as port:
                await is_welcome(port, listener, "wrong")

    run(scenario())
    assert compared == [(b"wrong", TOKEN.encode())] * 2


def test_friends_stay_when_strangers_come_and_their_number_is_bounded() -> None:
    async def scenario() -> None:
        limits = ListenerLimits(600_000, unauthenticated_max=2, connections_max=3)
        async with control(limits) as port:
            assert isinstance(port.address, tuple)
            address = f"tcp:{port.address[0]}:{port.address[1]}"
            friends = []
            for _ in range(3):
                link = await connect(address)
                link.send(Hello(token=TOKEN, role="client"))
                assert isinstance(await link.receive(), Heartbeat)
                friends.append(link)
            for _ in range(5):
                reader, writer = await port.stranger()
                await is_hung_up_on(reader)  # there are three connections already
                writer.close()
            friends.pop().close()
            for link in friends:
                link.send(Heartbeat())
                assert isinstance(await link.receive(), Heartbeat)
            while not await is_welcome(port, control):  # noqa: ASYNC110  until the end of one is seen
                await asyncio.sleep(0.01)

    run(scenario())


def test_friends_may_say_more_than_strangers() -> None:
    async def scenario() -> None:
        async with control(PATIENT) as port:
            reader, writer = await port.stranger()
            link = StreamLink(reader, writer)
            link.send(Hello(token=TOKEN, role="client"))
            await link.receive()
            large = encode(Hello(token="x" * 1_000_000, role="client"))
            writer.writelines([struct.pack("<I", len(large)), large])
            assert isinstance(await link.receive(), Heartbeat)
            link.close()

    run(scenario())


def test_friends_may_not_say_more_than_the_option_allows() -> None:
    async def scenario() -> None:
        async with control(replace(PATIENT, message_size_max_bytes=1_000)) as port:
            reader, writer = await port.stranger()
            link = StreamLink(reader, writer)
            link.send(Hello(token=TOKEN, role="client"))
            await link.receive()
            link.send(Hello(token="x" * 900, role="client"))
            assert isinstance(await link.receive(), Heartbeat)
            link.send(Hello(token="x" * 1_000, role="client"))
            assert await link.receive() is None
            link.close()

    run(scenario())


def test_one_large_message_is_not_a_peer_that_takes_nothing() -> None:
    """Data that has piled up in front of a message counts, not the message itself."""

    async def scenario() -> None:
        async with control(PATIENT) as port:
            reader, writer = await port.stranger()
            link = StreamLink(reader, writer, unsent_bytes_max=1_000)
            link.send(Hello(token=TOKEN, role="client"))
            await link.receive()
            for _ in range(2):
                link.send(Hello(token="x" * 5_000_000, role="client"))
                assert isinstance(await link.receive(), Heartbeat)
            link.send(Hello(token=MORE_THAN_SOCKETS_HOLD, role="client"))
            link.send(Heartbeat())
            assert await link.receive() is None, "this much waited in front of the last message"
            link.close()

    run(scenario())


def test_a_friend_who_does_not_read_is_hung_up_on_as_the_option_says() -> None:
    sent = asyncio.Event()

    async def serve(hello: Hello, link: ControlLink) -> None:
        link.send(Hello(token=MORE_THAN_SOCKETS_HOLD, role="client"))
        link.send(Heartbeat())
        sent.set()
        await link.receive()

    async def answers(unsent_max_bytes: int) -> list[str]:
        server = ControlServer(TOKEN, serve, replace(PATIENT, unsent_max_bytes=unsent_max_bytes))
        await server.listen(None)
        link = await connect(server.addresses[0])
        sent.clear()
        link.send(Hello(token=TOKEN, role="client"))
        await sent.wait()
        found = []
        while len(found) < 2 and (message := await link.receive()) is not None:
            found.append(type(message).__name__)
        link.close()
        await server.close()
        return found

    async def scenario() -> None:
        assert await answers(60_000_000) == ["Hello", "Heartbeat"]
        assert await answers(1_000_000) == []

    run(scenario())


def test_a_metrics_endpoint_serves_while_others_do_not_read_their_answers() -> None:
    endpoint = open_endpoint(MetricsRegistry(), 0, "127.0.0.1", FEW)
    assert endpoint is not None
    held = []
    for _ in range(20):
        deaf = socket.create_connection(("127.0.0.1", endpoint.port))
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n")
        held.append(deaf)
    with socket.create_connection(("127.0.0.1", endpoint.port), GUARD_S) as friend:
        friend.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert friend.recv(1 << 16).startswith(b"HTTP/1.0 200")
    while serving() > FEW.unauthenticated_max:  # those that were hung up on end by themselves
        time.sleep(0.01)
    for deaf in held:
        deaf.close()
    endpoint.close()


def serving() -> int:
    """Return the number of threads that serve requests."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_the_limits_are_options_of_the_job() -> None:
    texts = {
        "headgate.listener.handshake-timeout": "2 s",
        "headgate.listener.unauthenticated-max": "7",
        "headgate.listener.connections-max": "70",
        "headgate.listener.frame-size-max": "2 mb",
        "headgate.control.message-size-max": "3 mb",
    }
    assert ListenerLimits.of(Options(texts)) == ListenerLimits(2000, 7, 70, 2 << 20, 3 << 20)
    assert ListenerLimits.of(Options()) == ListenerLimits()


def test_a_connection_that_left_makes_room() -> None:
    closed: list[int] = []
    admission = Admission(ListenerLimits(unauthenticated_max=2), "test")
    for number in range(10):
        admission.enter(number, lambda number=number: closed.append(number))
        admission.leave(number)
    assert not closed
    for number in range(3):
        admission.enter(number, lambda number=number: closed.append(number))
    admission.authenticate(0)  # too late
    assert closed == [0]
    assert admission.turned_away == 1


def request(method: str, path: str, *headers: str, host: str = "localhost") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


async def said(port: Port, *parts: bytes) -> bytes:
    """Return all that the port answers to a request, until it hangs up."""
    reader, writer = await port.stranger()
    for part in parts:
        writer.write(part)
    answer = await is_hung_up_on(reader)
    writer.close()
    return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


@pytest.mark.parametrize(
    "shown", [(), ("Authorization: Bearer wrong",), ("Authorization: Basic c2VjcmV0",)]
)
def test_the_rest_api_tells_nothing_but_health_without_the_token(shown: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with rest(PATIENT) as port:
            paths = [(r.method, r.path.replace("{vertex}", "1"), r.public) for r in ROUTES]
            for method, path, public in [*paths, ("GET", "/", False), ("PUT", "/v1/job", False)]:
                answer = await said(port, request(method, path, *shown))
                assert (path, status_of(answer)) == (path, 200 if public else 401)
                assert b"headgate-job" not in answer

    run(scenario())


@pytest.mark.parametrize(
    ("headers", "host", "status"),
    [
        ((), "evil.example", 421),
        ((), "127.0.0.1.evil.example:80", 421),
        (("Origin: http://evil.example",), "localhost", 403),
        (("Origin: null",), "127.0.0.1", 403),
        (("Origin: http://jobs.example",), "jobs.example", 200),
        ((), "10.0.0.7:8081", 200),
    ],
)
def test_the_rest_api_does_not_answer_pages_of_other_sites(
    headers: tuple[str, ...], host: str, status: int
) -> None:
    """Also not with the token, which a page may have got from its user."""

    async def scenario() -> None:
        async with rest(PATIENT, **{"rest.address": "jobs.example"}) as port:
            token = (f"Authorization: Bearer {TOKEN}", "Connection: close")
            for path in ("/v1/job", "/healthz"):
                answer = await said(port, request("GET", path, *token, *headers, host=host))
                assert (path, status_of(answer)) == (path, status)

    run(scenario())


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_above_the_bound_is_not_read(declared: bool) -> None:
    async def scenario() -> None:
        async with rest(PATIENT) as port:
            size = 10 << 20
            length = f"Content-Length: {size}" if declared else "Transfer-Encoding: chunked"
            token = f"Authorization: Bearer {TOKEN}"
            reader, writer = await port.stranger()
            writer.write(request("POST", "/v1/job/stop", token, length))
            piece = b" " * 65_536
            if not declared:
                writer.writelines([b"10000\r\n" + piece + b"\r\n"] * 2)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert status_of(answer) == 413
            writer.close()

    run(scenario())


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with rest(HASTY) as port:
            head = request(
                "POST", "/v1/job/stop", f"Authorization: Bearer {TOKEN}", "Content-Length: 9"
            )
            reader, writer = await port.stranger()
            writer.write(head + b"{")
            assert status_of(await reader.readuntil(b"\r\n\r\n")) == 408
            writer.close()

    run(scenario())


def test_a_client_with_the_token_stays_when_strangers_come() -> None:
    async def scenario() -> None:
        async with rest(FEW) as port:
            reader, writer = await port.stranger()
            ask = request("GET", "/v1/job", f"Authorization: Bearer {TOKEN}")
            for _ in range(3):
                writer.write(ask)
                assert status_of(await reader.readuntil(b"\r\n\r\n")) == 200
                assert b"headgate-job" in await reader.readuntil(b"}")
                strangers = [await port.stranger() for _ in range(10)]
                for _, stranger in strangers:
                    stranger.close()
            writer.close()

    run(scenario())


def test_followers_of_events_are_bounded() -> None:
    async def scenario() -> None:
        async with rest(PATIENT, **{"headgate.rest.watchers-max": "1"}) as port:
            token = f"Authorization: Bearer {TOKEN}"
            ask = request("GET", "/v1/job/events", token)
            reader, writer = await port.stranger()
            writer.write(ask)
            assert status_of(await reader.readuntil(b"\r\n\r\n")) == 200
            other, also = await port.stranger()
            also.write(ask)
            assert status_of(await other.readuntil(b"\r\n\r\n")) == 503
            writer.close()
            also.close()

    run(scenario())
