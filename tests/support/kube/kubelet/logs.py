"""The part of a kubelet's HTTPS server that `kubectl logs` and forwarded ports need."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import ssl
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from headgate.tests.support.kube.kubelet import spdy
from headgate.tests.support.kube.kubelet.kubelet import Kubelet
from headgate.tests.support.kube.kubelet.pod import Container, Pod

FOLLOW_S = 0.1


async def serve(kubelet: Kubelet, directory: Path) -> int:
    """Listen on a free port of loopback, and return it."""
    app = web.Application()

    async def logs(request: web.Request) -> web.StreamResponse:
        return await _logs(kubelet, request)

    async def forward(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").upper() == spdy.UPGRADE:
            return await _forward_streams(kubelet, request)
        return await _forward(kubelet, request)

    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", logs)
    app.router.add_route("*", "/portForward/{namespace}/{pod}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=_certificate(directory))
    await site.start()
    port: int = runner.addresses[0][1]
    return port


async def _logs(kubelet: Kubelet, request: web.Request) -> web.StreamResponse:
    container = _find(kubelet, request)
    path = container.previous_log if request.query.get("previous") == "true" else container.log
    if path is None or not path.exists():
        raise web.HTTPBadRequest(text="there is no log of this container yet")
    return await _send(request, path, lambda: container.log == path and _runs(container))


def _find_pod(kubelet: Kubelet, request: web.Request) -> Pod:
    wanted = request.match_info
    for pod in kubelet.pods.values():
        metadata = pod.pod["metadata"]
        if (metadata["namespace"], metadata["name"]) == (wanted["namespace"], wanted["pod"]):
            return pod
    raise web.HTTPNotFound(text="no such pod")


def _find(kubelet: Kubelet, request: web.Request) -> Container:
    pod = _find_pod(kubelet, request)
    for container in pod.init + pod.containers:
        if container.name == request.match_info["container"]:
            return container
    raise web.HTTPNotFound(text="no such container")


async def _forward(kubelet: Kubelet, request: web.Request) -> web.WebSocketResponse:
    """One forwarded connection, over a WebSocket: channel 0 has its bytes, and channel 1 errors."""
    pod, port = _find_pod(kubelet, request), int(request.query["port"])
    socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
    await socket.prepare(request)
    for channel in (b"\0", b"\1"):
        await socket.send_bytes(channel + port.to_bytes(2, "little"))
    try:
        reader, writer = await kubelet.network.connect(pod.ip, port)
    except OSError as error:
        await socket.send_bytes(b"\1" + f"connect to {pod.ip}:{port}: {error}".encode())
        await socket.close()
        return socket

    async def answer() -> None:
        while data := await reader.read(1 << 15):
            await socket.send_bytes(b"\0" + data)
        await socket.close()

    answering = asyncio.create_task(answer())
    async for message in socket:
        writer.write(message.data[1:])
    answering.cancel()
    writer.close()
    return socket


async def _forward_streams(kubelet: Kubelet, request: web.Request) -> web.StreamResponse:
    """Forward all connections of one `kubectl port-forward`, until it leaves."""
    pod, transport = _find_pod(kubelet, request), request.transport
    assert transport is not None
    transport.write(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n"
        f"Upgrade: {spdy.UPGRADE}\r\nX-Stream-Protocol-Version: {spdy.PROTOCOL}\r\n\r\n".encode()
    )
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
    await spdy.Session(reader, writer, lambda port: kubelet.network.connect(pod.ip, port)).run()
    transport.close()
    request.protocol.connection_lost(None)  # of aiohttp, which no longer hears of it
    return web.Response()


def _runs(container: Container) -> bool:
    return container.running is not None


async def _send(
    request: web.Request, path: Path, goes_on: Callable[[], bool]
) -> web.StreamResponse:
    data = path.read_bytes()
    read_bytes = len(data)
    if "tailLines" in request.query:
        count = int(request.query["tailLines"])
        data = b"".join(data.splitlines(keepends=True)[-count:]) if count else b""
    if "limitBytes" in request.query:
        data = data[: int(request.query["limitBytes"])]
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    await response.write(data)
    if request.query.get("follow") == "true":
        with path.open("rb") as file:
            file.seek(read_bytes)
            while goes_on():
                await response.write(file.read())
                await asyncio.sleep(FOLLOW_S)
            await response.write(file.read())
    await response.write_eof()
    return response


def _certificate(directory: Path) -> ssl.SSLContext:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "process-kubelet")])
    today = dt.datetime.now(dt.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - dt.timedelta(days=1))
        .not_valid_after(today + dt.timedelta(days=30))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    path = directory / "kubelet.pem"
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context
