"""`headgate ui`: one page with all jobs of this machine and of a storage, and each job's own page below it.

The server listens on loopback and has a token of its own. It passes requests for a job on to the job's
coordinator with the job's token, so a browser needs no other address and no other token.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import quote

from aiohttp import web

from ...errors import HeadgateError, JobError, JobNotFound, UsageError
from ..finding import HERE, Where, connect_to_job
from ..listening import LOOPBACK, ListenerLimits
from ..rest.answers import Problem, RequestProblem, problem, problem_of
from ..rest.client import RestClient
from ..rest.pages import add_pages, add_redirection, is_page
from ..rest.replies import HEADERS, json_reply, problem_of_http, refusal
from ..rest.requests import check_names, check_token
from ..rest.server import RestListener
from .console import say
from .foreground import run_until_interrupted
from .jobs import find_statuses
from .listing import find_stored, runs_json

if TYPE_CHECKING:
    from ..control.registry import JobRecord
    from ..storage.stored_jobs import StoredJob

HERE_PATH: Final = "jobs"
STORED_PATH: Final = "stored"
BODY_BYTES_MAX: Final = 64 << 10
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def show(port: int, place: Where) -> None:
    """Serve the page until Ctrl-C, and print its link.

    Args:
        port: of TCP; 0: the system chooses one.
        place: its storage is listed beside the jobs of this machine, if it names one.

    Raises:
        UsageError: the port cannot be opened.
    """
    with contextlib.suppress(KeyboardInterrupt):
        run_until_interrupted(_serve(JobsServer(place, secrets.token_urlsafe(32)), port))


async def _serve(server: JobsServer, port: int) -> None:
    try:
        say(f"the web UI: {await server.listen(port)}\nit is served until Ctrl-C")
        await asyncio.Event().wait()
    finally:
        await server.close()


class JobsServer:
    """Lists jobs, serves the web UI, and passes requests for a job on to its coordinator."""

    def __init__(self, place: Where, token: str) -> None:
        """Nothing is open yet.

        Args:
            place: its storage is listed beside the jobs of this machine, if it names one.
            token: the secret that the browser must show.
        """
        self._place = place
        self._token = token
        self._clients: dict[tuple[str, str], RestClient] = {}
        self._listener = RestListener(ListenerLimits(), "web UI")
        self._runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=1.0)

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_BYTES_MAX)
        for path in ("/", "/ui"):
            add_redirection(app, path, "ui/jobs.html")
        add_redirection(app, "/ui/", "jobs.html")
        add_pages(app)
        app.router.add_route("GET", "/v1/jobs", self._list)
        for kind in (HERE_PATH, STORED_PATH):
            add_pages(app, f"/{kind}/{{job}}")
            for method in ("GET", "POST"):
                app.router.add_route(method, f"/{kind}/{{job}}/{{path:v1/.*}}", self._pass_on)
        return app

    async def listen(self, port: int) -> str:
        """Open the port on loopback; returns the link of the page, with the token.

        Raises:
            UsageError: the port cannot be opened.
        """
        await self._runner.setup()
        assert self._runner.server is not None
        try:
            opened = await self._listener.listen_at(self._runner.server, LOOPBACK, port)
        except OSError as error:
            raise UsageError(
                f"the port cannot be opened port=`{port}` cause=`{error.strerror or error}`",
                fix="choose another one with --port, or leave it out",
            ) from None
        assert isinstance(opened, asyncio.Server)
        number = opened.sockets[0].getsockname()[1]
        return f"http://{LOOPBACK}:{number}/ui/jobs.html#token={self._token}"

    async def close(self) -> None:
        """Hang up on all clients."""
        self._listener.stop_listening()
        for client in self._clients.values():
            await client.close()
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check names and token of every request, and answer errors as problem details."""
        trusted = False
        try:
            check_names(request.headers.get("Host"), request.headers.get("Origin"), ())
            if not is_page(request):
                check_token(request.headers.get("Authorization"), self._token)
                self._authenticate(request)
                trusted = True
            return await handler(request)
        except RequestProblem as refused:
            return refusal(refused.problem, close=not trusted)
        except HeadgateError as error:
            return refusal(problem_of(error), close=not trusted)
        except web.HTTPException as error:
            return refusal(problem_of_http(error), close=True)

    def _authenticate(self, request: web.Request) -> None:
        connection = (
            self._listener.connections.get(request.transport) if request.transport else None
        )
        if connection is not None:
            connection.authenticate()

    # -- the list -----------------------------------------------------------------------------------

    async def _list(self, request: web.Request) -> web.StreamResponse:
        here, unread = await find_statuses()
        rows = [_row_here(record, status) for record, status in here]
        problems = [str(error) for error in unread]
        if self._place.storage:
            try:
                stored = await find_stored(self._place)
            except HeadgateError as error:
                problems.append(str(error))
                stored = []
            known = {row["run"]: row for row in rows if row["run"]}
            for job, status in stored:
                row = _row_stored(job, status)
                if row["run"] in known:
                    known[row["run"]]["runs"] = row["runs"]
                else:
                    rows.append(row)
        listed = {"jobs": rows, "storage": self._place.storage or None, "problems": problems}
        return json_reply(listed)

    # -- one job ------------------------------------------------------------------------------------

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        _, kind, _, path = request.rel_url.raw_path.split("/", 3)
        query = f"?{request.rel_url.raw_query_string}" if request.rel_url.raw_query_string else ""
        key = kind, request.match_info["job"]
        client = await self._client(*key)
        body = await request.read()
        response: web.StreamResponse | None = None
        try:
            async with client.passed_on(request.method, f"/{path}{query}", body) as answer:
                if answer.status == 401:
                    raise JobError("another coordinator has taken this address")
                headers = {**HEADERS, "Content-Type": answer.headers.get("Content-Type", "")}
                response = web.StreamResponse(status=answer.status, headers=headers)
                try:
                    await response.prepare(request)
                except ConnectionError:
                    return response
                async for chunk in answer.content.iter_any():
                    try:
                        await response.write(chunk)
                    except ConnectionError:
                        # The browser has left. Others use the same client.
                        return response
                with contextlib.suppress(ConnectionError):
                    await response.write_eof()
        except (JobError, ConnectionError) as error:
            if self._clients.get(key) is client:
                del self._clients[key]
                await client.close()
            if response is None:
                return refusal(_unreachable(error), close=False)
            response.force_close()  # the answer is cut short
        return response

    async def _client(self, kind: str, name: str) -> RestClient:
        """Return a connection to the coordinator of a job.

        Raises:
            HeadgateError: there is no such job, or it cannot be reached.
        """
        found = self._clients.get((kind, name))
        if found is None:
            place = self._place if kind == STORED_PATH else HERE
            if kind == STORED_PATH and not place.storage:
                raise JobNotFound("no storage is shown here", fix="start `headgate ui --storage`")
            found = await connect_to_job(name, place)
            if self._clients.setdefault((kind, name), found) is not found:
                await found.close()  # another request was faster
                found = self._clients[kind, name]
        return found


def _unreachable(error: Exception) -> Problem:
    return problem(503, f"the job cannot be reached: {error}")


def _row_here(record: JobRecord, status: dict[str, Any] | None) -> dict[str, Any]:
    known = status or {}
    return {
        "name": record.name,
        "place": "this machine",
        "path": None if status is None else f"{HERE_PATH}/{quote(record.name, safe='')}/",
        "status": known.get("status", "NOT ANSWERING"),
        "run": known.get("run", ""),
        "began_ms": record.started_ms,
        "ended_ms": None,
        "parallelism": known.get("parallelism"),
        "restarts": known.get("restarts"),
        "last_checkpoint": known.get("last_checkpoint") or None,
        "last_checkpoint_at_ms": known.get("last_checkpoint_at_ms") or None,
        "findings": [each["sentence"] for each in known.get("backpressure", ())],
        "runs": [],
    }


def _row_stored(job: StoredJob, status: str) -> dict[str, Any]:
    runs = runs_json(job)
    newest = runs[-1]
    answers = job.ended is None and status not in ("DEAD", "UNREACHABLE", "ALIVE", "NOT ENDED")
    return {
        "name": job.name,
        "place": "the storage",
        "path": f"{STORED_PATH}/{quote(job.name, safe='')}/" if answers else None,
        "status": status,
        "run": newest["run"],
        "began_ms": newest["began_ms"],
        "ended_ms": newest["ended_ms"],
        "parallelism": job.view.parallelism or None,
        "restarts": newest["restarts"],
        "last_checkpoint": newest["checkpoint"],
        "last_checkpoint_at_ms": None,
        "findings": [newest["failure"]["text"]] if newest["failure"] else [],
        "runs": runs,
    }
