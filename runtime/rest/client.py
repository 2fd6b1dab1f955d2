"""The client of the REST API, for asyncio, by which other processes talk to a coordinator."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from ...errors import HeadgateError, JobError, UsageError
from ..control.job_client import HungUp, PublishedEvent, Silent
from . import answers, evidence, state_answers
from .answers import Command, OperationAnswer, OperationStatus, Problem, error_of
from .evidence import decode_event
from .following import ChangesReader
from .routes import ARROW_STREAM, KEEP_ALIVE_S, ROUTES, VERBS, WAIT_S_MAX

TIMEOUT_S: Final = 30.0
CONNECT_S: Final = 10.0
"""An address that does not answer within this time is left out, in s."""
ANSWER_BYTES_MAX: Final = 64 << 20
"""The largest answer that is accepted."""
EVENT_BYTES_MAX: Final = 16 << 20
A = TypeVar("A")
Json: TypeAlias = dict[str, Any]
_PATHS: Final = {route.name: route.path for route in ROUTES}
_VERBS: Final = {body: verb for verb, body in VERBS.items()}


class RestClient:
    """The REST API of one job, as a `JobClient`. Use it in `async with`, or close what `connect` returns.

    All methods raise HungUp, a JobError, if there is no answer in time. Otherwise they raise the error that
    the API reports, of the type that the same request raises in the CLI.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Nothing is connected yet.

        Args:
            url: such as `http://127.0.0.1:8081`, or `unix:` and the path of a Unix socket.
            token: of the job.
            timeout_s: an answer must come within this time, beside the time that a request asks to wait.
        """
        self._url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._base = ""

    @classmethod
    async def connect(
        cls, addresses: Sequence[str], token: str, *, timeout_s: float = CONNECT_S
    ) -> RestClient:
        """A client of the first address that answers: `unix:<path>` or `tcp:<host>:<port>`.

        Args:
            addresses: of one coordinator.
            token: of the job.
            timeout_s: an address that does not answer within this time is left out.

        Raises:
            Silent: none answers, and one does not refuse connections either.
            JobError: none takes connections.
        """
        problems: list[str] = []
        error_type: type[JobError] = JobError
        for address in addresses:
            kind, _, rest = address.partition(":")
            client = await cls(address if kind == "unix" else f"http://{rest}", token).__aenter__()
            try:
                await client._send("GET", _PATHS["healthz"], answers.Health, timeout_s=timeout_s)
            except HeadgateError as error:
                problems.append(f"{address}: {error.message}")
                error_type = Silent if isinstance(error, Silent) else error_type
                await client.close()
            except BaseException:
                await client.close()
                raise
            else:
                return client
        raise error_type(
            f"the coordinator does not answer: {'; '.join(problems)}",
            fix="is the job still running? `headgate list` shows those that are",
        )

    async def __aenter__(self) -> RestClient:
        headers = {"Authorization": f"Bearer {self._token}"}
        kind, _, path = self._url.partition(":")
        connector = aiohttp.UnixConnector(path) if kind == "unix" else None
        self._base = "http://localhost" if connector else self._url
        # Redirects and proxies would carry the token elsewhere.
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # -- looking ------------------------------------------------------------------------------------

    async def healthy(self) -> bool:
        """Return True if the coordinator's event loop answers."""
        return await self._answers("healthz")

    async def ready(self) -> bool:
        """Return True if the job is RUNNING or FINISHED."""
        return await self._answers("readyz")

    async def status(self) -> answers.StatusAnswer:
        """Return the status of the job with all parts."""
        return await self._get("status", answers.StatusAnswer)

    async def job(self) -> answers.JobAnswer:
        """Return the status of the job."""
        return await self._get("job", answers.JobAnswer)

    async def vertices(self) -> list[answers.VertexAnswer]:
        """Return the vertices, with the figures of their subtasks."""
        return (await self._get("vertices", answers.VerticesAnswer)).vertices

    async def subtasks(self, vertex: int) -> list[answers.SubtaskAnswer]:
        """Return the subtasks of a vertex, by its id."""
        return (await self._get("subtasks", answers.SubtasksAnswer, vertex=vertex)).subtasks

    async def checkpoints(self) -> answers.CheckpointsAnswer:
        """Return the last checkpoints."""
        return await self._get("checkpoints", answers.CheckpointsAnswer)

    async def checkpoint_detail(self, number: int) -> answers.CheckpointDetail:
        """Return one checkpoint, with all its subtasks."""
        return await self._get("checkpoint_detail", answers.CheckpointDetail, checkpoint=number)

    async def watermarks(self) -> list[answers.StepTimeAnswer]:
        """Return the event time of each step that makes watermarks."""
        return (await self._get("watermarks", answers.WatermarksAnswer)).event_time

    async def curves(self, since_ms: int = 0) -> answers.CurvesAnswer:
        """Return the figures of the last minutes, as far as they are later than `since_ms`."""
        return await self._get("curves", answers.CurvesAnswer, query={"since_ms": since_ms})

    async def logs(self, after: int = 0, level: str = "DEBUG") -> evidence.LogsAnswer:
        """Return the last lines of the log behind this number, of this level and more severe ones."""
        query, texts = {"after": after}, {"level": level}
        return await self._get("logs", evidence.LogsAnswer, query=query, texts=texts)

    async def lost(self) -> evidence.LostAnswer:
        """Return what steps have dropped, with samples of the records."""
        return await self._get("lost", evidence.LostAnswer)

    async def backpressure(self) -> list[answers.Cause]:
        """Return the tasks that make the job slow."""
        return (await self._get("backpressure", answers.BackpressureAnswer)).backpressure

    async def exceptions(self) -> answers.ExceptionsAnswer:
        """Return the last failures, and calls that do not return."""
        return await self._get("exceptions", answers.ExceptionsAnswer)

    async def config(self) -> answers.ConfigAnswer:
        """Return the options in effect."""
        return await self._get("config", answers.ConfigAnswer)

    async def plan(self) -> answers.PlanAnswer:
        """Return the plan that runs."""
        return await self._get("plan", answers.PlanAnswer)

    async def metrics(self) -> answers.MetricsAnswer:
        """Return the metrics of the coordinator's process."""
        return await self._get("metrics", answers.MetricsAnswer)

    async def states(self) -> list[state_answers.QueryableAnswer]:
        """Return the states that can be read by key."""
        return (await self._get("states", state_answers.StatesAnswer)).states

    async def query(self, state: str, key: str, level: str = "live") -> state_answers.QueryAnswer:
        """Return the value of a state for a key, which is written as the REST API takes it."""
        texts = {"key": key, "level": level}
        return await self._get("query", state_answers.QueryAnswer, texts=texts, state=state)

    async def rows(
        self, state: str, keys: Sequence[str], level: str = "live"
    ) -> state_answers.RowsAnswer:
        """Return the values of a state for some keys, which are written as the REST API takes them."""
        texts = {"key": keys, "level": level}
        return await self._get("rows", state_answers.RowsAnswer, texts=texts, state=state)

    async def owners(self, state: str) -> state_answers.OwnersAnswer:
        """Return the workers that have the key groups of a state."""
        return await self._get("owners", state_answers.OwnersAnswer, state=state)

    async def changes(
        self, state: str, keys: Sequence[str], level: str, reader: ChangesReader
    ) -> AsyncGenerator[state_answers.ChangesAnswer | None]:
        """Yield None once the stream is open, and then what changes of some keys, until the job has ended.

        Args:
            state: the name of the state.
            keys: as the REST API takes them.
            level: `committed` or `live`.
            reader: knows the position from which the client goes on, and the one that it has come to.

        Raises:
            HungUp: the coordinator has gone away.
        """
        given = urlencode({"key": keys, "level": level}, doseq=True)
        path = f"{_PATHS['changes'].format(state=quote(state, safe=''))}?{given}"
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._timeout_s, sock_read=self._timeout_s + KEEP_ALIVE_S
        )
        headers = {"Last-Event-ID": reader.after} if reader.after else {}
        async with self._request("GET", path, timeout, b"", headers=headers) as response:
            await _check(response)
            yield None
            async for line in _lines(response):
                if (change := reader.read(line)) is not None:
                    yield change
                if reader.ended:
                    return
        raise HungUp

    async def scan(self, state: str, given: Mapping[str, str]) -> state_answers.ScanAnswer:
        """Return some rows of a state; `given` is what the REST API takes."""
        return await self._get("scan", state_answers.ScanAnswer, texts=given, state=state)

    async def scan_arrow(self, state: str, given: Mapping[str, str]) -> tuple[bytes, str | None]:
        """Return some rows of a state as an Arrow IPC stream, and the token of the next ones."""
        path = f"{_PATHS['scan'].format(state=quote(state, safe=''))}?{urlencode(given)}"
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with self._request("GET", path, timeout, b"", accept=ARROW_STREAM) as response:
            await _check(response)
            return await _read(response), response.headers.get("Headgate-Next")

    async def profile(self, vertex: int, subtask: int, seconds: int) -> answers.ProfileAnswer:
        """Return what a subtask runs and waits for during the next seconds (at most 60)."""
        query = {"subtask": subtask, "seconds": seconds}
        return await self._get("profile", answers.ProfileAnswer, query=query, vertex=vertex)

    # -- doing --------------------------------------------------------------------------------------

    async def begin(self, command: Command) -> OperationAnswer:
        """Begin an operation; sent again with the same `trigger_id`, it is still one."""
        path = _PATHS[_VERBS[type(command)]]
        return await self._send("POST", path, OperationAnswer, body=msgspec.json.encode(command))

    async def operation(self, trigger_id: str, *, wait_s: int = 0) -> OperationAnswer:
        """Return an operation; with `wait_s` (at most 60) once it has ended, or after this time."""
        return await self._get(
            "operation", OperationAnswer, query={"wait_s": wait_s}, trigger_id=trigger_id
        )

    async def operations(self) -> list[OperationAnswer]:
        """Return the operations that the coordinator remembers, oldest first."""
        return (await self._get("operations", answers.OperationsAnswer)).operations

    async def carry_out(self, command: Command) -> dict[str, Any]:
        """Begin an operation and wait for its end, however long it takes; returns its result.

        A coordinator that takes over does not know the operation: then it is asked for again.

        Raises:
            HeadgateError: it was refused, or failed, or there was no answer.
        """
        operation = await self.begin(command)
        while operation.status is OperationStatus.IN_PROGRESS:
            try:
                operation = await self.operation(command.trigger_id, wait_s=WAIT_S_MAX)
            except UsageError:
                operation = await self.begin(command)
        if operation.problem is not None:
            raise error_of(operation.problem)
        return operation.result or {}

    async def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send a request by the name of a verb, as in `JobClient`."""
        if verb in VERBS:
            given = {**arguments, "triggerId": secrets.token_hex(16)}
            try:
                command = msgspec.convert(given, VERBS[verb])
            except msgspec.ValidationError as error:
                raise UsageError(f"this cannot be asked for verb=`{verb}`: {error}") from None
            return await self.carry_out(command)
        if verb not in _PATHS:
            raise UsageError(f"unknown request verb=`{verb}`")
        if verb == "checkpoints" and "id" in arguments:
            return await self._get("checkpoint_detail", Json, checkpoint=arguments["id"])
        if verb == "query":
            texts = {"key": str(arguments["key"]), "level": str(arguments.get("level") or "live")}
            return await self._get(verb, Json, texts=texts, state=arguments["state"])
        if verb == "logs":
            query, texts = {"after": int(arguments["after"])}, {"level": str(arguments["level"])}
            return await self._get(verb, Json, query=query, texts=texts)
        return await self._get(verb, Json, **arguments)

    async def events(self) -> AsyncIterator[PublishedEvent]:
        """What happens to the job, until it has ended: first what is remembered, then what comes.

        The last event is of kind `overrun` if this client was too slow.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s)
        kind = ""
        async with self._request("GET", _PATHS["events"], timeout, b"") as response:
            await _check(response)
            # A line may be longer than what aiohttp reads as one.
            async for line in _lines(response):
                field, _, value = line.partition(": ")
                if field == "event":
                    kind = value
                elif field == "data":
                    yield decode_event(kind, value)

    @contextlib.asynccontextmanager
    async def passed_on(
        self, method: str, path: str, body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request of another client; its answer comes as the API gives it, however long it takes."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s)
        async with self._request(method, path, timeout, body) as response:
            yield response

    # -- the wire -----------------------------------------------------------------------------------

    async def _answers(self, name: str) -> bool:
        try:
            await self._get(name, answers.Health)
        except HeadgateError:
            return False
        return True

    async def _get(
        self,
        name: str,
        answer: type[A],
        *,
        query: Mapping[str, int] | None = None,
        texts: Mapping[str, str | Sequence[str]] | None = None,
        **parameters: Any,
    ) -> A:
        quoted = {key: quote(str(value), safe="") for key, value in parameters.items()}
        path = _PATHS[name].format(**quoted)
        numbers = {key: value for key, value in (query or {}).items() if value}
        given = urlencode({**numbers, **(texts or {})}, doseq=True)
        wait_s = max(numbers.get("wait_s", 0), numbers.get("seconds", 0))
        return await self._send(
            "GET",
            f"{path}?{given}" if given else path,
            answer,
            timeout_s=self._timeout_s + wait_s,
        )

    async def _send(
        self,
        method: str,
        path: str,
        answer: type[A],
        *,
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> A:
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        async with self._request(method, path, timeout, body) as response:
            await _check(response)
            data = await _read(response)
        try:
            return msgspec.json.decode(data, type=answer)
        except msgspec.DecodeError as error:
            raise JobError(f"this is no answer of a REST API of headgate: {error}") from None

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        timeout: aiohttp.ClientTimeout,
        body: bytes,
        *,
        accept: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {**({"Content-Type": "application/json"} if body else {}), **(headers or {})}
        if self._session is None:
            raise JobError("the client is closed", fix="use it in `async with`")
        try:
            async with self._session.request(
                method,
                self._base + path,
                data=body or None,
                headers={**headers, "Accept": accept} if accept else headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                yield response
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            error_type = Silent if isinstance(error, TimeoutError) else HungUp
            raise error_type(
                f"the REST API does not answer url=`{self._url}`: {error or type(error).__name__}",
                fix="is the job still running?",
            ) from None


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raise the error that a refusal describes."""
    if response.status < 300:
        return
    data = await _read(response)
    try:
        found = msgspec.json.decode(data, type=Problem)
    except msgspec.DecodeError:
        raise JobError(f"the REST API refused a request status=`{response.status}`") from None
    raise error_of(found)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > ANSWER_BYTES_MAX:
            raise JobError(f"the answer is longer than {ANSWER_BYTES_MAX} bytes")
    return bytes(data)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    left = b""
    async for chunk in response.content.iter_any():
        *whole, left = (left + chunk).split(b"\n")
        if len(left) > EVENT_BYTES_MAX:
            raise JobError(f"an event is longer than {EVENT_BYTES_MAX} bytes")
        for line in whole:
            yield line.decode()
