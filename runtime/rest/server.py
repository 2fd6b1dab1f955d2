"""The REST API of a coordinator, in its event loop: the way to it for clients in other processes.

Its sockets count their connections as all listeners do (`listening.py`): a connection that has not shown
the token is closed after a while, also in the middle of a request.

The sockets are open from the beginning, so that the job can be found, but aiohttp is loaded for the first
connection only: many jobs end before anybody asks about them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

import msgspec

from ...errors import HeadgateError, InternalError
from ...operators.clock import Clock
from ..control.job_client import EventQueue, Subscriber
from ..listening import LOOPBACK, Admission, Listener, ListenerLimits, UnixSocket
from ..observe.recent_logs import LEVELS
from ..options.network import (
    PORT_PATIENCE,
    QUERY_CHANGES_INTERVAL,
    QUERY_SUBSCRIPTIONS_MAX,
    REST_ADDRESS,
    REST_BIND_ADDRESS,
    REST_BODY_MAX,
    REST_CLOSE_TIMEOUT,
    REST_EVENTS,
    REST_OPERATIONS,
    REST_PORT,
    REST_WATCHERS,
)
from ..options.registry import Options
from .answers import (
    Command,
    Health,
    OperationAnswer,
    OperationsAnswer,
    RequestProblem,
    problem,
    problem_of,
)
from .evidence import encode_event
from .following import Changes
from .openapi import document
from .replies import binary_reply, event_stream, json_reply, problem_of_http, refusal
from .requests import Operations, allowed_names, check_names, check_token, shows
from .routes import (
    ARROW_STREAM,
    KEEP_ALIVE_S,
    PROFILE_S,
    PROFILE_S_MAX,
    ROUTES,
    SUBTASK_MAX,
    WAIT_S_MAX,
    Route,
)

if TYPE_CHECKING:
    from aiohttp import web

ANY_PORT = range(1)
"""The ports with which the operating system chooses one."""
READY: Final = frozenset({"RUNNING", "FINISHED"})
NAMED: Final = frozenset({"savepoint", "rescale"})
"""Verbs for which a request that is sent again to the next coordinator would be another operation."""
SINCE_MS_MAX: Final = 10**15 - 1
LIMIT_MAX: Final = 10**9
LINGER_S: Final = 1.0
"""The rest of a refused body is read and dropped for this time, so that the client sees the refusal."""
_log = logging.getLogger("headgate.rest")
Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"
HttpFactory: TypeAlias = Callable[[], asyncio.Protocol]
"""Makes what speaks HTTP on one connection."""
_PUBLIC: Final = frozenset(route.path for route in ROUTES if route.public)
_BY_NAME: Final[Mapping[str, Route]] = {route.name: route for route in ROUTES}


class Connection(asyncio.Protocol):
    """One connection: counts it, and closes it if no valid token comes in time; the rest is aiohttp's."""

    def __init__(self, http: asyncio.Protocol, listener: RestListener) -> None:
        self._http = http
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._listener.connections[self._transport] = self
        limits = self._listener.admission.limits
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(limits.handshake_timeout_s, self.abort)
        self._http.connection_made(transport)
        self._listener.admission.enter(self, self.abort)

    def data_received(self, data: bytes) -> None:
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            self._listener.connections.pop(self._transport, None)
        self._listener.admission.leave(self)
        self._http.connection_lost(exc)

    def authenticate(self) -> None:
        """Note that a request on this connection has shown the token."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._listener.admission.authenticate(self)

    def abort(self) -> None:
        """Close at once, and drop what has not been sent yet."""
        if self._transport is not None:
            self._transport.abort()


class LateHttp(asyncio.Protocol):
    """Speaks HTTP on one connection as soon as that can be; what arrives before it waits."""

    def __init__(self, load: Callable[[], Awaitable[HttpFactory]]) -> None:
        self._load = load
        self._http: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self._opening = loop.create_task(self._open(self._transport), name="load HTTP")

    async def _open(self, transport: asyncio.Transport) -> None:
        try:
            http = (await self._load())()
        except ConnectionError:  # it was closed in the meantime
            transport.abort()
            return
        except Exception:
            _log.exception("the REST API cannot be served")
            transport.abort()
            return
        if transport.is_closing():
            return
        self._http = http
        http.connection_made(transport)
        if self._early:
            http.data_received(b"".join(self._early))
            self._early.clear()
            if not transport.is_closing():
                transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._http is not None:
            self._http.data_received(data)
        elif self._transport is not None:
            self._early.append(data)
            self._transport.pause_reading()

    def eof_received(self) -> bool | None:
        return None if self._http is None else self._http.eof_received()

    def pause_writing(self) -> None:
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._http is not None:
            self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._http is not None:
            self._http.connection_lost(exc)
        elif self._opening is not None:
            self._opening.cancel()


def needs_port(options: Options, node_host: str) -> bool:
    """Return True if clients use the API over TCP: the user says so, or peers are on other machines."""
    return options.get(REST_PORT) is not None or node_host != LOOPBACK


class RestListener:
    """Listens on a Unix socket, on a TCP port, or on both."""

    def __init__(self, limits: ListenerLimits, name: str = "REST API") -> None:
        """Nothing is open yet. `name` is that of the listener in the log."""
        self.admission = Admission(limits, name)
        self.connections: dict[asyncio.BaseTransport, Connection] = {}
        self._servers: list[asyncio.AbstractServer] = []
        self._unix: UnixSocket | None = None

    async def listen_unix(self, make_http: HttpFactory, path: str) -> None:
        """Open a Unix socket that this user only can reach."""
        loop = asyncio.get_running_loop()
        socket = UnixSocket(path)

        def listen(path: str) -> Awaitable[asyncio.AbstractServer]:
            return loop.create_unix_server(lambda: Connection(make_http(), self), path)

        self._servers.append(await socket.open(listen))
        self._unix = socket

    async def listen(
        self, make_http: HttpFactory, options: Options, node_host: str
    ) -> tuple[str, int]:
        """Open a port of the option `rest.port`; returns host and port for clients.

        Args:
            make_http: speaks HTTP on one connection.
            options: of the job.
            node_host: the address of this machine among the peers.

        Raises:
            HeadgateError: all its ports stay taken, or there is no such address.
        """
        first, _, _ = (options.get(REST_ADDRESS) or "").partition(",")
        listener = Listener(
            ports=options.get(REST_PORT) or ANY_PORT,
            bind_host=options.get(REST_BIND_ADDRESS),
            advertised_host=first.strip() or None,
            patience_ms=options.get(PORT_PATIENCE),
            port_key=REST_PORT.key,
            bind_key=REST_BIND_ADDRESS.key,
            advertised_key=REST_ADDRESS.key,
        )

        async def open_server(host: str, port: int) -> asyncio.AbstractServer:
            return await self.listen_at(make_http, host, port)

        _, told, port = await listener.open(open_server, node_host)
        return told, port

    async def listen_at(
        self, make_http: HttpFactory, host: str, port: int
    ) -> asyncio.AbstractServer:
        """Open this port; raises OSError if that is not possible."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(make_http(), self), host, port)
        self._servers.append(server)
        return server

    def stop_listening(self) -> None:
        """Take no further connections; open ones go on."""
        for server in self._servers:
            server.close()
        if self._unix is not None:
            self._unix.remove()


class Coordinator(Protocol):
    """The part of a coordinator that the API needs."""

    def view(self, verb: str, **arguments: Any) -> dict[str, Any]: ...

    async def ask(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]: ...

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]: ...


class RestServer:
    """Serves the REST API of one job."""

    def __init__(
        self,
        coordinator: Coordinator,
        token: str,
        options: Options,
        clock: Clock,
        *,
        query_token: str | None = None,
    ) -> None:
        """Nothing is open yet.

        Args:
            coordinator: whom it asks.
            token: the secret that clients must show.
            options: of the job.
            clock: time of operations.
            query_token: another secret, which is enough for queries of state; None: there is none.
        """
        self._coordinator = coordinator
        self._token, self._query_token = token, query_token
        self._options = options
        self._clock = clock
        self._names = allowed_names(options.get(REST_ADDRESS))
        self._operations = Operations(options.get(REST_OPERATIONS))
        self._ended: dict[str, asyncio.Event] = {}
        """The events of operations that go on, set when they end."""
        self._untold: dict[str, asyncio.Event] = {}
        """The operations whose end no client has been told, with events that are set once one is."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: set[EventQueue] = set()
        self._following = 0
        """The number of clients that follow keys."""
        self._closing = False
        self._listener = RestListener(ListenerLimits.of(options))
        self._close_s = options.get(REST_CLOSE_TIMEOUT) / 1000
        self._runner: web.AppRunner | None = None
        """Serves the requests, once there was a connection."""
        self._loading = asyncio.Lock()
        self._closed = False
        self.url = ""
        """The address for clients on other machines; empty: there is no TCP port."""
        self._unix_path = ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses for `RestClient.connect`, in the order in which it tries them."""
        unix = (f"unix:{self._unix_path}",) if self._unix_path else ()
        return (*unix, *((f"tcp:{self.url.removeprefix('http://')}",) if self.url else ()))

    def _application(self) -> web.Application:
        from aiohttp import web

        from .pages import add_pages, add_redirection

        app = web.Application(
            middlewares=[web.middleware(partial(self._guard))],
            client_max_size=self._options.get(REST_BODY_MAX),
        )
        for route in ROUTES:
            app.router.add_route(route.method, route.path, self._handler(route))
        add_pages(app)
        add_redirection(app, "/ui", "ui/")
        return app

    def _handler(self, route: Route) -> Handler:
        own: Handler | None = getattr(self, f"_get_{route.name}", None)
        if own is not None:
            return own

        async def show(request: web.Request) -> web.StreamResponse:
            return json_reply(msgspec.convert(self._coordinator.view(route.view), route.answer))

        async def begin(request: web.Request) -> web.StreamResponse:
            assert route.body is not None
            return await self._begin(request, route.name, route.body)

        return show if route.body is None else begin

    # -- the socket ---------------------------------------------------------------------------------

    async def listen_unix(self, path: str) -> None:
        """Open a Unix socket that this user only can reach."""
        await self._listener.listen_unix(self._make_http, path)
        self._unix_path = path

    async def listen(self, node_host: str = LOOPBACK) -> None:
        """Open a port of the option `rest.port`.

        Args:
            node_host: the address of this machine among the peers.

        Raises:
            HeadgateError: none can be opened.
        """
        told, port = await self._listener.listen(self._make_http, self._options, node_host)
        self.url = f"http://{f'[{told}]' if ':' in told else told}:{port}"
        _log.info("REST API url=`%s`", self.url)

    def _make_http(self) -> asyncio.Protocol:
        """Return what speaks HTTP on one connection."""
        return LateHttp(self._http)

    async def _http(self) -> HttpFactory:
        """Return the protocol of aiohttp, which is loaded beside the event loop if it has to be."""
        async with self._loading:
            if self._closed:
                raise ConnectionAbortedError
            if self._runner is None:
                web = await asyncio.to_thread(import_module, "aiohttp.web")
                runner = web.AppRunner(
                    self._application(),
                    access_log=None,
                    shutdown_timeout=self._close_s,
                    lingering_time=LINGER_S,
                )
                await runner.setup()
                self._runner = runner
        assert self._runner.server is not None
        return self._runner.server

    async def close(self) -> None:
        """Answer requests under way, as far as that takes little time, and stop.

        A client that has begun an operation asks for its end on its own. So new requests are answered
        until the clients of the operations that ended with the job know it.
        """
        self._closing = True
        for watcher in self._watchers:
            watcher.close()
        since_ms = self._clock.now_ms() - round(1000 * self._close_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._close_s):
                if self._tasks:
                    await asyncio.wait(self._tasks)
                await self._told_since(since_ms)
        self._listener.stop_listening()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self._loading:
            self._closed = True
            runner = self._runner
        if runner is not None:
            await runner.cleanup()

    async def _told_since(self, since_ms: int) -> None:
        """Wait until clients know the end of each operation that has ended since then."""
        recent = {
            each.trigger_id for each in self._operations.all if (each.ended_ms or 0) >= since_ms
        }
        waiting = [told.wait() for each, told in self._untold.items() if each in recent]
        await asyncio.gather(*waiting)

    def _note_told(self, answers: Sequence[OperationAnswer]) -> None:
        """Note that a client is told of these operations, and so of the end of those that have ended."""
        for answer in answers:
            if answer.ended_ms is not None and answer.trigger_id in self._untold:
                self._untold.pop(answer.trigger_id).set()

    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check names and token of every request, and answer errors as problem details."""
        from aiohttp import web

        trusted = False
        try:
            trusted = self._admit(request)
            return await handler(request)
        except RequestProblem as refused:
            return refusal(refused.problem, close=not trusted)
        except HeadgateError as error:
            return refusal(problem_of(error), close=not trusted)
        except web.HTTPException as error:
            return refusal(problem_of_http(error), close=True)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            _log.exception("a request to the REST API broke path=`%s`", request.path)
            broken = InternalError(f"the REST API broke: {type(error).__name__}: {error}")
            return refusal(problem_of(broken), close=True)

    def _admit(self, request: web.Request) -> bool:
        """Raise RequestProblem for a stranger; return False for a request that needs no token."""
        from .pages import is_page

        check_names(request.headers.get("Host"), request.headers.get("Origin"), self._names)
        if request.method == "GET" and (request.path in _PUBLIC or is_page(request)):
            return False
        authorization = request.headers.get("Authorization")
        if self._query_token is not None and shows(authorization, self._query_token):
            if not _is_query(request):
                raise RequestProblem(
                    403,
                    "this token is for queries of state alone\n  send the token of the job instead",
                )
        else:
            check_token(authorization, self._token)
        if (connection := self._connection(request)) is not None:
            connection.authenticate()
        return True

    def _connection(self, request: web.Request) -> Connection | None:
        return self._listener.connections.get(request.transport) if request.transport else None

    # -- answers of its own -------------------------------------------------------------------------

    async def _get_healthz(self, request: web.Request) -> web.StreamResponse:
        return json_reply(Health(status="ok"), close=True)

    async def _get_readyz(self, request: web.Request) -> web.StreamResponse:
        status = self._coordinator.view("status")["status"]
        if status not in READY:
            return refusal(problem(503, f"the job is {status}"), close=True)
        return json_reply(Health(status="ready"), close=True)

    async def _get_openapi(self, request: web.Request) -> web.StreamResponse:
        return json_reply(document())

    async def _get_subtasks(self, request: web.Request) -> web.StreamResponse:
        vertex = _number(request, "vertex")
        known = {each["id"] for each in self._coordinator.view("status").get("vertices", ())}
        if known and vertex not in known:
            raise RequestProblem(404, f"no such vertex id=`{vertex}`")
        found = self._coordinator.view("subtasks", vertex=vertex)
        return json_reply(msgspec.convert(found, _route("subtasks").answer))

    async def _get_checkpoint_detail(self, request: web.Request) -> web.StreamResponse:
        number = _number(request, "checkpoint")
        found = self._coordinator.view("checkpoints", id=number)
        if not found:
            raise RequestProblem(
                404, f"checkpoint {number} is not remembered (web.checkpoints.history)"
            )
        return json_reply(msgspec.convert(found, _route("checkpoint_detail").answer))

    async def _get_curves(self, request: web.Request) -> web.StreamResponse:
        since_ms = _in_query(request, "since_ms", SINCE_MS_MAX)
        found = self._coordinator.view("curves", since_ms=since_ms)
        return json_reply(msgspec.convert(found, _route("curves").answer))

    async def _get_logs(self, request: web.Request) -> web.StreamResponse:
        level = request.query.get("level", LEVELS[0])
        if level not in LEVELS:
            raise RequestProblem(400, f"level is one of {', '.join(LEVELS)} level=`{level}`")
        after = _in_query(request, "after", SINCE_MS_MAX)
        found = self._coordinator.view("logs", after=after, level=level)
        return json_reply(msgspec.convert(found, _route("logs").answer))

    async def _get_profile(self, request: web.Request) -> web.StreamResponse:
        vertex = _number(request, "vertex")
        if vertex not in {
            each["id"] for each in self._coordinator.view("status").get("vertices", ())
        }:
            raise RequestProblem(404, f"no such vertex id=`{vertex}`")
        seconds = _in_query(request, "seconds", PROFILE_S_MAX) or PROFILE_S
        subtask = _in_query(request, "subtask", SUBTASK_MAX)
        given = {"vertex": vertex, "subtask": subtask, "seconds": seconds}
        found = await self._coordinator.ask("profile", given)
        return json_reply(msgspec.convert(found, _route("profile").answer))

    async def _get_query(self, request: web.Request) -> web.StreamResponse:
        keys = request.query.getall("key", [])
        if len(keys) != 1:
            raise RequestProblem(400, f"a query has one parameter `key`, and this has {len(keys)}")
        given = {**_state_and_level(request), "key": keys[0]}
        found = await self._coordinator.ask("query", given)
        return json_reply(msgspec.convert(found, _route("query").answer))

    async def _get_rows(self, request: web.Request) -> web.StreamResponse:
        given = {**_state_and_level(request), "keys": request.query.getall("key", [])}
        found = await self._coordinator.ask("rows", given)
        return json_reply(msgspec.convert(found, _route("rows").answer))

    async def _get_owners(self, request: web.Request) -> web.StreamResponse:
        found = await self._coordinator.ask("owners", {"state": request.match_info["state"]})
        return json_reply(msgspec.convert(found, _route("owners").answer))

    async def _get_scan(self, request: web.Request) -> web.StreamResponse:
        wanted = request.headers.get("Accept", "")
        arrow = wanted.partition(";")[0].strip() == ARROW_STREAM
        texts = {
            n: request.query[n] for n in ("from", "to", "prefix", "next") if n in request.query
        }
        limit = _in_query(request, "limit", LIMIT_MAX)
        given = {**_state_and_level(request), **texts, "limit": limit, "arrow": arrow}
        found = await self._coordinator.ask("scan", given)
        if not arrow:
            return json_reply(msgspec.convert(found, _route("scan").answer))
        told = {"Next": found["next"], "Level": found["level"], "Checkpoint": found["checkpoint"]}
        headers = {f"Headgate-{name}": str(value) for name, value in told.items() if value}
        return binary_reply(found["stream"], ARROW_STREAM, headers)

    # -- operations ---------------------------------------------------------------------------------

    async def _begin(
        self, request: web.Request, verb: str, body: type[Command]
    ) -> web.StreamResponse:
        command = await self._read(request, body)
        arguments = {k: v for k, v in msgspec.to_builtins(command).items() if k != "triggerId"}
        if verb == "stop" and arguments["savepoint"] is None:
            del arguments["savepoint"]  # its presence is what asks for one
        answer, new = self._operations.begin(
            command.trigger_id, verb, arguments, self._clock.now_ms()
        )
        if new:
            self._ended[command.trigger_id] = asyncio.Event()
            task = asyncio.get_running_loop().create_task(
                self._carry_out(command.trigger_id, verb, arguments), name=f"REST {verb}"
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._note_told([answer])
        return json_reply(
            answer, status=202, headers={"Location": f"/v1/operations/{command.trigger_id}"}
        )

    async def _read(self, request: web.Request, body: type[Command]) -> Command:
        """Return the body of a request.

        Raises:
            RequestProblem: it is not valid (400), or does not arrive in time (408).
        """
        if (request.content_length or 0) > self._options.get(REST_BODY_MAX):
            from aiohttp import web

            raise web.HTTPRequestEntityTooLarge(self._options.get(REST_BODY_MAX))
        try:
            async with asyncio.timeout(self._listener.admission.limits.handshake_timeout_s):
                data = await request.read()
        except TimeoutError:
            raise RequestProblem(408, "the body of the request did not come in time") from None
        try:
            return msgspec.json.decode(data, type=body)
        except msgspec.DecodeError as error:
            raise RequestProblem(400, f"the body is not as it should be: {error}") from None

    async def _carry_out(self, trigger_id: str, verb: str, arguments: dict[str, Any]) -> None:
        try:
            # The next coordinator must know a request that is sent again: the command carries its id.
            named = {**arguments, "trigger": trigger_id} if verb in NAMED else arguments
            result = await self._coordinator.ask(verb, named)
            self._operations.complete(trigger_id, result, self._clock.now_ms())
        except HeadgateError as error:
            self._operations.fail(trigger_id, problem_of(error), self._clock.now_ms())
        except Exception as error:
            _log.exception("an operation broke verb=`%s`", verb)
            broken = InternalError(f"the operation broke: {type(error).__name__}: {error}")
            self._operations.fail(trigger_id, problem_of(broken), self._clock.now_ms())
        finally:
            remembered = {each.trigger_id for each in self._operations.all}
            self._untold = {k: told for k, told in self._untold.items() if k in remembered}
            self._untold[trigger_id] = asyncio.Event()
            self._ended.pop(trigger_id).set()

    async def _get_operations(self, request: web.Request) -> web.StreamResponse:
        self._note_told(self._operations.all)
        return json_reply(OperationsAnswer(operations=self._operations.all))

    async def _get_operation(self, request: web.Request) -> web.StreamResponse:
        trigger_id = request.match_info["trigger_id"]
        wait_s = _in_query(request, "wait_s", WAIT_S_MAX)
        ended = self._ended.get(trigger_id)
        if ended is not None and wait_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await ended.wait()
        answer = self._operations.find(trigger_id)
        self._note_told([answer])
        return json_reply(answer)

    # -- events -------------------------------------------------------------------------------------

    async def _get_events(self, request: web.Request) -> web.StreamResponse:
        limit = self._options.get(REST_WATCHERS)
        if len(self._watchers) >= limit:
            raise RequestProblem(
                503, f"too many clients follow the events headgate.rest.watchers-max=`{limit}`"
            )
        events = EventQueue(self._options.get(REST_EVENTS))
        response = event_stream()
        self._watchers.add(events)
        unsubscribe = self._coordinator.subscribe(events)
        try:
            await response.prepare(request)
            await self._stream(request, response, _texts_of(events))
        finally:
            unsubscribe()
            self._watchers.discard(events)
        return response

    async def _get_changes(self, request: web.Request) -> web.StreamResponse:
        limit = self._options.get(QUERY_SUBSCRIPTIONS_MAX)
        if self._following >= limit:
            raise RequestProblem(
                503, f"too many clients follow keys {QUERY_SUBSCRIPTIONS_MAX.key}=`{limit}`"
            )
        given = {
            **_state_and_level(request),
            "keys": request.query.getall("key", []),
            "after": request.headers.get("Last-Event-ID", ""),
        }
        changes = Changes(
            partial(self._coordinator.ask, "changes"),
            given,
            self._options.get(QUERY_CHANGES_INTERVAL) / 1000,
            KEEP_ALIVE_S,
        )
        response = event_stream()
        self._following += 1
        try:
            first = await changes.first()
            await response.prepare(request)
            await self._stream(request, response, self._until_closed(first, changes))
        finally:
            self._following -= 1
        return response

    async def _until_closed(self, first: bytes, changes: Changes) -> AsyncGenerator[bytes]:
        """Yield the texts of a stream of changes as long as the server goes on."""
        yield first
        async for data in changes.texts():
            yield data
            if self._closing:
                return

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, texts: AsyncGenerator[bytes]
    ) -> None:
        """Write texts until there are no more, or the client accepts none."""
        patience_s = self._listener.admission.limits.handshake_timeout_s
        async with contextlib.aclosing(texts):
            async for data in texts:
                if request.transport is None or request.transport.is_closing():
                    return  # the client has left
                if not data:
                    continue
                try:
                    async with asyncio.timeout(patience_s):
                        await response.write(data)
                except ConnectionError:
                    return
                except TimeoutError:
                    _log.warning("hung up on a client that follows events and reads none")
                    if (connection := self._connection(request)) is not None:
                        connection.abort()
                    return


async def _texts_of(events: EventQueue) -> AsyncGenerator[bytes]:
    """Yield events as texts until there are no more; comments while nothing happens."""
    while True:
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                event = await events.next()
        except TimeoutError:
            yield b": nothing happened\n\n"
            continue
        if event is None:
            return
        yield encode_event(event)


def _is_query(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    path = None if resource is None else resource.canonical
    return any(
        route.queries and (route.method, route.path) == (request.method, path) for route in ROUTES
    )


def _route(name: str) -> Route:
    return _BY_NAME[name]


def _number(request: web.Request, name: str) -> int:
    text = request.match_info[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise RequestProblem(404, f"{name} is a whole number {name}=`{text}`")
    return int(text)


def _state_and_level(request: web.Request) -> dict[str, str]:
    return {"state": request.match_info["state"], "level": request.query.get("level", "")}


def _in_query(request: web.Request, name: str, most: int) -> int:
    """Return a whole number of the query; 0 if it is left out."""
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and int(text) <= most):
        raise RequestProblem(400, f"{name} is a whole number from 0 to {most} {name}=`{text}`")
    return int(text)
