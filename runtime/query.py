"""`headgate.query`: reads the state of running jobs by key, from any process with the token of the job.

    with hg.query.connect("payments") as state:
        state.get("totals", "alice")

`connect` is for scripts, notebooks and threads; `connect_async` is the same for asyncio. A client finds the
coordinator of the job again after a failover, and asks again while the job restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, TypeVar

import msgspec

from ..errors import HeadgateError, JobError, JobNotReady, ScanOver, UsageError
from ..operators.durations import Duration, parse_duration
from ..operators.queries import key_as_plain, write_key
from .control.job_client import HungUp
from .control.registry import read_token_file
from .finding import Where, connect_to_job
from .rest.client import RestClient
from .rest.following import ChangesReader
from .rest.state_answers import (
    ChangesAnswer,
    QueryableAnswer,
    QueryAnswer,
    RowAnswer,
    RowsAnswer,
    ScanAnswer,
    ScannedAnswer,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from .reads.client import DirectReader, ReadValues

T = TypeVar("T")
Level: TypeAlias = Literal["live", "committed"]
PATIENCE: Final = "10s"
_SCANS: Final = 5
"""The number of times that a table is read from its beginning."""
_PAUSE_S: Final = 0.05
_PAUSE_S_MAX: Final = 1.0
_Connect = Callable[[], Awaitable[RestClient]]


class AsyncQueryClient:
    """Reads the queryable states of one job, in one event loop. Use it in `async with`, or close it."""

    def __init__(self, connect: _Connect, patience_s: float, *, direct: bool = True) -> None:
        """
        Args:
            connect: finds the coordinator of the job.
            patience_s: how long a call goes on while the job restarts, or cannot be reached.
            direct: keys are read at the workers that have them, where those can be reached.
        """
        self._reads_directly = direct
        self._direct: DirectReader | None = None
        self._connect = connect
        self._patience_s = patience_s
        self._client: RestClient | None = None
        self._known: dict[str, QueryableAnswer] = {}
        """The states of the job, as far as they were asked for on this connection."""
        self._connecting = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        """Connect at once, so that a wrong name or token is an error here."""
        self._client = await self._connect()
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
        async with self._connecting:
            self._closed = True
        direct, self._direct = self._direct, None
        if direct is not None:
            await direct.close()
        await self._disconnect(self._client)

    async def states(self) -> list[QueryableAnswer]:
        """Return the queryable states of the job.

        Raises:
            HeadgateError: the job cannot be asked.
        """
        return await self._patiently(RestClient.states)

    async def query(self, state: str, key: Any, *, level: Level = "live") -> QueryAnswer:
        """Return what a state has for a key, and where and when it was read.

        Args:
            state: the name that the job gives with `queryable=`.
            key: the key as the job has it: a value, or a tuple or dict of several columns.
            level: `live`: as it is now, which a failure may take back; `committed`: as of the newest
                complete checkpoint, for states that the job declares so (`Queryable`).

        Raises:
            StateNotFound: the job has no queryable state of that name.
            UsageError: the key is not of the state's type, or the state does not have that level.
            JobNotReady: the job did not become ready in time.
            HeadgateError: the job cannot be asked, has ended, or cannot answer.
        """
        return await self._patiently(partial(self._query, state=state, key=key, level=level))

    async def query_many(
        self, state: str, keys: Iterable[Any], *, level: Level = "live"
    ) -> RowsAnswer:
        """Return what a state has for several keys, in their order, up to 250 of them.

        At the level `committed` all of it is of one checkpoint. The arguments and errors are those of
        `query`.
        """
        listed = list(keys)
        return await self._patiently(
            partial(self._query_many, state=state, keys=listed, level=level)
        )

    async def get(self, state: str, key: Any, default: Any = None, *, level: Level = "live") -> Any:
        """Return the value of a state for a key as plain data; `default` if it has none.

        The other arguments and the errors are those of `query`.
        """
        (value,) = await self._patiently(
            partial(self._values, state=state, keys=[key], default=default, level=level)
        )
        return value

    async def get_many(
        self, state: str, keys: Iterable[Any], default: Any = None, *, level: Level = "live"
    ) -> list[Any]:
        """Return the value of a state for each of several keys, up to 250 of them, as `get` does.

        That is much cheaper than a `get` for each of them. At the level `committed` all of it is of one
        checkpoint.
        """
        listed = list(keys)
        return await self._patiently(
            partial(self._values, state=state, keys=listed, default=default, level=level)
        )

    async def follow(
        self, state: str, *keys: Any, level: Level = "committed", after: str = ""
    ) -> AsyncGenerator[ChangesAnswer]:
        """Yield the values of some keys, and then each change of them, until the job has ended.

        Each answer has the rows of the keys that have changed; the first one has all. A key that is not
        found any more has changed, too. It goes on when the job restarts, and with its next coordinator:
        no change comes twice, and the newest values are never missed.

        Args:
            state: the name that the job gives with `queryable=`.
            keys: up to 250 keys, as in `query`.
            level: `committed`: the values as of each complete checkpoint; those between two checkpoints
                are not told. `live`: the values while the job runs, looked at now and then.
            after: the `id` of an answer, behind which it goes on: only values that are others come.

        Raises:
            JobNotReady: the job did not become ready in time, or too many clients follow keys.
            HeadgateError: as in `query`.
        """
        texts = await self._patiently(partial(self._texts, state=state, keys=list(keys)))
        async with contextlib.aclosing(self.follow_texts(state, texts, level, after)) as changes:
            async for change in changes:
                yield change

    async def follow_texts(
        self, state: str, keys: Sequence[str], level: str, after: str = ""
    ) -> AsyncGenerator[ChangesAnswer]:
        """Yield changes as `follow` does; the keys are texts as the REST API takes them."""
        followed = _Followed(self._disconnect, state, keys, level, after)
        try:
            while not followed.reader.ended:
                change = await self._patiently(followed.next)
                if change is not None:
                    yield change
        finally:
            await followed.close()

    async def scan(
        self,
        state: str,
        *,
        prefix: Any = None,
        start: Any = None,
        stop: Any = None,
        level: Level = "live",
    ) -> AsyncGenerator[ScannedAnswer]:
        """Yield the keys that a state has, and their values, in no particular order.

        At the level `committed` all of it is of one checkpoint.

        Args:
            state: the name that the job gives with `queryable=`.
            prefix: only keys that begin with this text, or whose first columns are this tuple.
            start: only keys from this one on.
            stop: only keys before this one.
            level: as in `query`.

        Raises:
            ScanOver: the scan cannot go on, since the job has restarted or has no memory left for the
                values of that checkpoint.
            HeadgateError: as in `query`.
        """
        written = await self._written(state, prefix, start, stop, level)
        async for page in self.pages(state, written):
            for row in page.rows:
                yield row

    async def pages(self, state: str, given: Mapping[str, str]) -> AsyncGenerator[ScanAnswer]:
        """Yield the pages of a scan; `given` are texts as the REST API takes them."""
        more = True
        while more:
            page = await self._patiently(partial(RestClient.scan, state=state, given=given))
            yield page
            given, more = _next_page(given, page.next), page.next is not None

    async def table(
        self,
        state: str,
        *,
        prefix: Any = None,
        start: Any = None,
        stop: Any = None,
        level: Level = "live",
    ) -> pa.Table:
        """Return the keys that a state has, and their values, as a table.

        A scan that cannot go on is begun again, a few times. The arguments and errors are those of `scan`.
        """
        import pyarrow as pa

        for left in reversed(range(_SCANS)):
            written = await self._written(state, prefix, start, stop, level)
            try:
                streams = [stream async for stream in self.streams(state, written)]
                return pa.concat_tables([pa.ipc.open_stream(each).read_all() for each in streams])
            except ScanOver:
                if not left:
                    raise
        raise AssertionError

    async def streams(self, state: str, given: Mapping[str, str]) -> AsyncGenerator[bytes]:
        """Yield the pages of a scan as Arrow IPC streams; see `pages`."""
        token: str | None = ""
        while token is not None:
            ask = partial(RestClient.scan_arrow, state=state, given=given)
            data, token = await self._patiently(ask)
            yield data
            given = _next_page(given, token)

    async def _written(
        self, state: str, prefix: Any, start: Any, stop: Any, level: Level
    ) -> dict[str, str]:
        """Return the parameters of a scan as the REST API takes them."""
        written: dict[str, str] = {"level": level}
        for name, key in (("from", start), ("to", stop)):
            if key is not None:
                texts = partial(self._texts, state=state, keys=[key])
                (written[name],) = await self._patiently(texts)
        if prefix is not None:
            written["prefix"] = (
                write_key(state, None, prefix) if isinstance(prefix, tuple) else prefix
            )
        return written

    async def _query(
        self, client: RestClient, *, state: str, key: Any, level: Level
    ) -> QueryAnswer:
        found = await self._read_directly(client, state, [key], level)
        if found is not None:
            rows = _rows(found, level, [key])
            row = msgspec.structs.asdict(rows.rows[0])
            shared = {n: v for n, v in msgspec.structs.asdict(rows).items() if n != "rows"}
            return QueryAnswer(**shared, **row)
        return await self._query_there(client, state, key, level)

    async def _query_there(
        self, client: RestClient, state: str, key: Any, level: Level
    ) -> QueryAnswer:
        """Ask the coordinator."""
        (text,) = await self._texts(client, state, [key])
        answer = await client.query(state, text, level)
        self._saw(state, answer.checkpoint)
        return answer

    async def _query_many(
        self, client: RestClient, *, state: str, keys: list[Any], level: Level
    ) -> RowsAnswer:
        found = await self._read_directly(client, state, keys, level) if keys else None
        if found is not None:
            return _rows(found, level, keys)
        return await self._query_many_there(client, state, keys, level)

    async def _query_many_there(
        self, client: RestClient, state: str, keys: list[Any], level: Level
    ) -> RowsAnswer:
        """Ask the coordinator."""
        rows = await client.rows(state, await self._texts(client, state, keys), level)
        self._saw(state, rows.checkpoint)
        return rows

    async def _values(
        self, client: RestClient, *, state: str, keys: list[Any], default: Any, level: Level
    ) -> list[Any]:
        """Return the values alone: of a direct read no rows are made."""
        found = await self._read_directly(client, state, keys, level) if keys else None
        if found is not None:
            for place in found.absent:
                found.values[place] = default
            return found.values
        if len(keys) == 1:
            answer = await self._query_there(client, state, keys[0], level)
            return [answer.value if answer.found else default]
        rows = (await self._query_many_there(client, state, keys, level)).rows
        return [row.value if row.found else default for row in rows]

    async def _read_directly(
        self, client: RestClient, state: str, keys: list[Any], level: Level
    ) -> ReadValues | None:
        """Read keys at the workers that have them; None: the coordinator must be asked."""
        known = self._known.get(state) or await self._state(client, state)
        if known is None or not self._reads_directly:
            return None
        if self._direct is None:
            from .reads.client import DirectReader

            self._direct = DirectReader()
        return await self._direct.read(client, known, keys, level)

    def _saw(self, state: str, checkpoint: int | None) -> None:
        if self._direct is not None:
            self._direct.saw(state, checkpoint)

    async def _state(self, client: RestClient, state: str) -> QueryableAnswer | None:
        if state not in self._known:
            self._known = {each.name: each for each in await client.states()}
        return self._known.get(state)

    async def _texts(self, client: RestClient, state: str, keys: list[Any]) -> list[str]:
        """Return the keys as the REST API takes them."""
        known = await self._state(client, state)
        # The job has the text about an unknown name.
        return ["" if known is None else write_key(state, known.key, key) for key in keys]

    async def _patiently(self, ask: Callable[[RestClient], Awaitable[T]]) -> T:
        """Ask until the job answers, or patience is over."""
        loop, pause_s = asyncio.get_running_loop(), _PAUSE_S
        deadline = loop.time() + self._patience_s
        while True:
            client: RestClient | None = None
            try:
                client = await self._connected()
                return await ask(client)
            except HungUp as error:
                await self._disconnect(client)
                problem: HeadgateError = error
            except JobNotReady as error:
                problem = error
            except JobError as error:
                if client is None or client is self._client:
                    raise
                problem = error  # another call has closed this connection, since it was broken
            if loop.time() + pause_s > deadline:
                raise problem
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _connected(self) -> RestClient:
        """Return the connection, or another one.

        A coordinator that cannot be found has a successor soon, or the job is over.
        """
        if self._client is not None and not self._connecting.locked() and not self._closed:
            return self._client
        async with self._connecting:
            if self._closed:
                raise UsageError("the client is closed", fix="use it in a `with` block")
            if self._client is None:
                try:
                    self._client = await self._connect()
                except JobError as error:
                    raise HungUp(error.message, fix=error.fix) from error
            return self._client

    async def _disconnect(self, client: RestClient | None) -> None:
        """Close this connection, unless another call has done so."""
        if client is not None and client is self._client:
            self._client, self._known = None, {}
            await client.close()


class _Followed:
    """Some keys that a client follows, over one connection after the other."""

    def __init__(
        self,
        disconnect: Callable[[RestClient], Awaitable[None]],
        state: str,
        keys: Sequence[str],
        level: str,
        after: str,
    ) -> None:
        self._disconnect = disconnect
        self._state, self._keys, self._level = state, keys, level
        self._stream: AsyncGenerator[ChangesAnswer | None] | None = None
        self.reader = ChangesReader(after)

    async def next(self, client: RestClient) -> ChangesAnswer | None:
        """Return the next change; None: the job has ended, or the stream has to be opened again.

        Raises:
            HeadgateError: it cannot be opened, or cannot go on.
        """
        opens = self._stream is None
        if self._stream is None:
            self._stream = client.changes(self._state, self._keys, self._level, self.reader)
        try:
            if opens:
                await anext(self._stream)
                opens = False
            return await anext(self._stream)
        except StopAsyncIteration:
            return None
        except HungUp:
            await self.close()
            if opens:
                raise
            await self._disconnect(client)
            await asyncio.sleep(_PAUSE_S)
            return None  # patience begins now
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave the stream."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()


class QueryClient:
    """Reads the queryable states of one job. Use it in `with`, or close it. Any thread may call it."""

    def __init__(self, client: AsyncQueryClient) -> None:
        self._client = client
        # A loop of its own: a caller, such as a notebook, may have one that runs already.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="headgate-query", daemon=True
        )
        self._thread.start()
        try:
            self._run(client.__aenter__())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. A client that is closed stays so."""
        if self._thread.is_alive():
            try:
                self._run(self._client.close())
            finally:
                self._stop()

    def states(self) -> list[QueryableAnswer]:
        """Return the queryable states of the job; see `AsyncQueryClient.states`."""
        return self._run(self._client.states())

    def query(self, state: str, key: Any, *, level: Level = "live") -> QueryAnswer:
        """Return what a state has for a key; see `AsyncQueryClient.query`."""
        return self._run(self._client.query(state, key, level=level))

    def query_many(self, state: str, keys: Iterable[Any], *, level: Level = "live") -> RowsAnswer:
        """Return what a state has for several keys; see `AsyncQueryClient.query_many`."""
        return self._run(self._client.query_many(state, keys, level=level))

    def get(self, state: str, key: Any, default: Any = None, *, level: Level = "live") -> Any:
        """Return the value of a state for a key; see `AsyncQueryClient.get`."""
        return self._run(self._client.get(state, key, default, level=level))

    def get_many(
        self, state: str, keys: Iterable[Any], default: Any = None, *, level: Level = "live"
    ) -> list[Any]:
        """Return the value of each of several keys; see `AsyncQueryClient.get_many`."""
        return self._run(self._client.get_many(state, keys, default, level=level))

    def follow(
        self, state: str, *keys: Any, level: Level = "committed", after: str = ""
    ) -> Iterator[ChangesAnswer]:
        """Yield the values of some keys, and each change of them; see `AsyncQueryClient.follow`."""
        yield from self._each(self._client.follow(state, *keys, level=level, after=after))

    def follow_texts(
        self, state: str, keys: Sequence[str], level: str, after: str = ""
    ) -> Iterator[ChangesAnswer]:
        """Yield changes as `follow` does; see `AsyncQueryClient.follow_texts`."""
        yield from self._each(self._client.follow_texts(state, keys, level, after))

    def scan(
        self,
        state: str,
        *,
        prefix: Any = None,
        start: Any = None,
        stop: Any = None,
        level: Level = "live",
    ) -> Iterator[ScannedAnswer]:
        """Yield the keys that a state has, and their values; see `AsyncQueryClient.scan`."""
        rows = self._client.scan(state, prefix=prefix, start=start, stop=stop, level=level)
        yield from self._each(rows)

    def pages(self, state: str, given: Mapping[str, str]) -> Iterator[ScanAnswer]:
        """Yield the pages of a scan; see `AsyncQueryClient.pages`."""
        yield from self._each(self._client.pages(state, given))

    def streams(self, state: str, given: Mapping[str, str]) -> Iterator[bytes]:
        """Yield the pages of a scan as Arrow IPC streams; see `AsyncQueryClient.streams`."""
        yield from self._each(self._client.streams(state, given))

    def _each(self, found: AsyncGenerator[T]) -> Iterator[T]:
        try:
            while (each := self._run(_next(found))) is not None:
                yield each
        finally:
            if self._thread.is_alive():
                self._run(found.aclose())

    def table(
        self,
        state: str,
        *,
        prefix: Any = None,
        start: Any = None,
        stop: Any = None,
        level: Level = "live",
    ) -> pa.Table:
        """Return the keys that a state has, and their values; see `AsyncQueryClient.table`."""
        return self._run(
            self._client.table(state, prefix=prefix, start=start, stop=stop, level=level)
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise UsageError("the client is closed", fix="use it in a `with` block")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C, for example: nobody waits any more
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _rows(found: ReadValues, level: Level, keys: list[Any]) -> RowsAnswer:
    """Return what was read at the owners as the REST API answers it."""
    owners, placed = found.owners, found.placed
    rows: dict[int, RowAnswer] = {}
    for part in placed.parts:
        owner = owners.owners[part.owner]
        for place in part.places:
            rows[place] = RowAnswer(
                attempt=owner.attempt,
                subtask=owner.subtask,
                key=key_as_plain(found.types, keys[place]),
                key_group=placed.groups[place],
                found=place not in found.absent,
                value=found.values[place],
            )
    return RowsAnswer(
        job=owners.job,
        run=owners.run,
        state=owners.state,
        kind=owners.kind,
        step=owners.step,
        level=level,
        checkpoint=found.checkpoint or None,
        rows=[rows[place] for place in range(len(keys))],
    )


def _next_page(given: Mapping[str, str], token: str | None) -> dict[str, str]:
    """Return the parameters of a scan for the page behind one with these."""
    return {"next": token or "", **{n: text for n, text in given.items() if n == "limit"}}


async def _next(rows: AsyncIterator[T]) -> T | None:
    return await anext(rows, None)


def connect(
    job: str,
    *,
    storage: str | os.PathLike[str] | None = None,
    cluster: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    url: str | None = None,
    token: str | None = None,
    options: Mapping[str, str] | None = None,
    patience: Duration = PATIENCE,
    direct: bool = True,
) -> QueryClient:
    """Connect to a running job, to read its state.

    The job is found as `hg.attach` finds it: by its storage, by its Ray cluster, or, with neither, on this
    machine. With `url` and `token` it is asked there, whatever its name.

    Args:
        job: the name of the job.
        storage: where its checkpoints are, as in `job.checkpoint(storage=...)`.
        cluster: the address of the Ray cluster it runs on.
        token_file: a file with the token of the job.
        url: the address of its REST API, such as `http://10.0.0.7:8081`.
        token: the token of the job, or the one for queries, beside `url`.
        options: those of the storage, such as `s3.endpoint`.
        patience: how long a call goes on while the job restarts, or cannot be reached.
        direct: keys are read at the workers that have them, where those can be reached from here; False:
            all goes through the coordinator.

    Raises:
        JobNotFound: no such job runs there.
        HeadgateError: it cannot be asked from here.
    """
    return QueryClient(
        connect_async(
            job,
            storage=storage,
            cluster=cluster,
            token_file=token_file,
            url=url,
            token=token,
            options=options,
            patience=patience,
            direct=direct,
        )
    )


def connect_async(
    job: str,
    *,
    storage: str | os.PathLike[str] | None = None,
    cluster: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    url: str | None = None,
    token: str | None = None,
    options: Mapping[str, str] | None = None,
    patience: Duration = PATIENCE,
    direct: bool = True,
) -> AsyncQueryClient:
    """Return a client for asyncio, which connects at the begin of `async with`.

    The arguments and errors are those of `connect`.
    """
    where = Where(
        storage="" if storage is None else os.fspath(storage),
        cluster=cluster or "",
        token_file="" if token_file is None else os.fspath(token_file),
        options=dict(options or {}),
    )
    found: _Connect = partial(connect_to_job, job, where)
    if url is not None:
        found = partial(_at, url, _token(token, token_file))
    elif token is not None:
        raise UsageError("token= goes with url=", fix="give both, or token_file=")
    return AsyncQueryClient(found, parse_duration(patience, "patience") / 1000, direct=direct)


def _token(token: str | None, token_file: str | os.PathLike[str] | None) -> str:
    if token is not None:
        return token
    if token_file is None:
        raise UsageError("url= needs the token of the job", fix="give token=, or token_file=")
    return read_token_file(Path(token_file))


def connect_at(job: str, where: Where) -> QueryClient:
    """Connect to a running job, which is found as `where` says; see `connect`."""
    patience_s = parse_duration(PATIENCE, "patience") / 1000
    return QueryClient(AsyncQueryClient(partial(connect_to_job, job, where), patience_s))


async def _at(url: str, token: str) -> RestClient:
    client = await RestClient(url, token).__aenter__()
    try:
        with contextlib.suppress(JobNotReady):
            await client.states()  # a wrong address or token is an error here
    except BaseException:
        await client.close()
        raise
    return client
