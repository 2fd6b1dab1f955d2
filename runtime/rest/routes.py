"""The table of routes: the server, the OpenAPI document and the client's paths are made from it."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from . import answers, evidence, state_answers
from .answers import Answer, Command


class Route(msgspec.Struct, frozen=True):
    """One path and method.

    Attributes:
        method: of HTTP.
        path: with `{names}` of its parameters.
        name: of the operation, unique; also that of the handler.
        answer: what it answers; None: a stream of server-sent events, or a document.
        summary: one sentence.
        view: the verb of the coordinator that has the answer; empty: the server has it.
        body: what it takes.
        status: of a good answer.
        public: True if it needs no token.
        queries: True if the token for queries is enough (`headgate.queries.token-file`).
        problems: status codes beside those that each route may answer.
        query: names and descriptions of query parameters; they are whole numbers.
        texts: names and descriptions of required query parameters; they are texts.
        optional: names and descriptions of other query parameters that are texts.
        media: type of a good answer.
        binary: another type of a good answer, which a client asks for with `Accept`.
        events: the data of the events of a stream.
    """

    method: str
    path: str
    name: str
    answer: type[Answer] | None
    summary: str
    view: str = ""
    body: type[Command] | None = None
    status: int = 200
    public: bool = False
    queries: bool = False
    problems: tuple[int, ...] = ()
    query: tuple[tuple[str, str], ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    optional: tuple[tuple[str, str], ...] = ()
    media: str = "application/json"
    binary: str = ""
    events: type[Answer] | None = None

    @property
    def parameters(self) -> list[str]:
        """The names in the path, in order."""
        return [text.split("}")[0] for text in self.path.split("{")[1:]]


class PathParameter(msgspec.Struct, frozen=True):
    """A parameter in a path."""

    type: type[Any]
    summary: str


PARAMETERS: Final = {
    "vertex": PathParameter(int, "The id of a vertex."),
    "checkpoint": PathParameter(int, "The number of a checkpoint."),
    "state": PathParameter(str, "The name of a queryable state."),
    "trigger_id": PathParameter(str, "The `triggerId` of an operation."),
}
ARROW_STREAM: Final = "application/vnd.apache.arrow.stream"
KEEP_ALIVE_S: Final = 15.0
"""A quiet stream of events gets a comment this often, which shows whether the client is still there."""
WAIT_S_MAX: Final = 60
PROFILE_S: Final = 5
"""How long a profile looks if the request does not say, in s."""
PROFILE_S_MAX: Final = 60
SUBTASK_MAX: Final = 10**9
"""The longest time that a client may wait for the end of an operation, in one request."""
VERBS: Final[dict[str, type[Command]]] = {
    "stop": answers.StopCommand,
    "cancel": answers.CancelCommand,
    "hand-over": answers.HandOverCommand,
    "checkpoint": answers.CheckpointCommand,
    "savepoint": answers.SavepointCommand,
    "rescale": answers.RescaleCommand,
    "dispose": answers.DisposeCommand,
}


def _operation(verb: str, body: type[Command]) -> Route:
    summary = (body.__doc__ or "").splitlines()[0]
    return Route(
        "POST",
        f"/v1/job/{verb}",
        verb,
        answers.OperationAnswer,
        f"{summary} The operation goes on after the answer.",
        body=body,
        status=202,
        problems=(400, 409, 413, 503),
    )


_LOG_LEVEL: Final = (
    "Only lines of this level and of more severe ones: `INFO`, `WARNING` or `ERROR`."
)
_KEY: Final = (
    "The key: the text of a single column, or a JSON object with a member for each column. "
    "A JSON value if its type is not declared."
)
_LEVEL: Final = (
    "`live`, the default: the value while the job runs; or `committed`: the value as of the newest "
    "complete checkpoint, for states that have this level."
)
_CHANGES_LEVEL: Final = (
    "`committed`, the default: the values as of each complete checkpoint, for states that have this "
    "level; or `live`: the values while the job runs, looked at now and then."
)
ROUTES: Final = (
    Route(
        "GET",
        "/healthz",
        "healthz",
        answers.Health,
        "The event loop of the coordinator answers.",
        public=True,
    ),
    Route(
        "GET",
        "/readyz",
        "readyz",
        answers.Health,
        "The job is RUNNING or FINISHED.",
        public=True,
        problems=(503,),
    ),
    Route("GET", "/v1/job", "job", answers.JobAnswer, "The status of the job.", "status"),
    Route(
        "GET",
        "/v1/job/status",
        "status",
        answers.StatusAnswer,
        "The status of the job with vertices, event time, backpressure and failures, all of one moment.",
        "status",
    ),
    Route(
        "GET",
        "/v1/job/vertices",
        "vertices",
        answers.VerticesAnswer,
        "The vertices of the job, with the figures of their subtasks.",
        "status",
        problems=(409,),
    ),
    Route(
        "GET",
        "/v1/job/vertices/{vertex}/subtasks",
        "subtasks",
        answers.SubtasksAnswer,
        "The subtasks of a vertex, and where they run.",
        problems=(404, 409),
    ),
    Route(
        "GET",
        "/v1/job/checkpoints",
        "checkpoints",
        answers.CheckpointsAnswer,
        "The last checkpoints and savepoints.",
        "checkpoints",
    ),
    Route(
        "GET",
        "/v1/job/checkpoints/{checkpoint}",
        "checkpoint_detail",
        answers.CheckpointDetail,
        "One checkpoint, with all its subtasks.",
        problems=(404,),
    ),
    Route(
        "GET",
        "/v1/job/watermarks",
        "watermarks",
        answers.WatermarksAnswer,
        "How far event time is, and who holds it back.",
        "status",
        problems=(409,),
    ),
    Route(
        "GET",
        "/v1/job/backpressure",
        "backpressure",
        answers.BackpressureAnswer,
        "Who makes the job slow.",
        "status",
        problems=(409,),
    ),
    Route(
        "GET",
        "/v1/job/exceptions",
        "exceptions",
        answers.ExceptionsAnswer,
        "The last failures, and calls that do not return.",
        "status",
        problems=(409,),
    ),
    Route(
        "GET",
        "/v1/job/config",
        "config",
        answers.ConfigAnswer,
        "The options in effect; values of secrets are masked.",
        "config",
        problems=(409,),
    ),
    Route(
        "GET",
        "/v1/job/vertices/{vertex}/profile",
        "profile",
        answers.ProfileAnswer,
        "What a subtask runs and waits for during the next seconds: the samples of a flame graph.",
        problems=(400, 404, 409, 503),
        query=(
            ("subtask", "The number of the subtask, from 0."),
            ("seconds", f"How long to look, up to {PROFILE_S_MAX}; {PROFILE_S} if it is left out."),
        ),
    ),
    Route(
        "GET",
        "/v1/job/plan",
        "plan",
        answers.PlanAnswer,
        "The physical plan that runs.",
        "plan",
        problems=(409,),
    ),
    Route(
        "GET",
        "/v1/job/curves",
        "curves",
        answers.CurvesAnswer,
        "Rates and time use of all vertices over the last minutes.",
        problems=(400, 409),
        query=(("since_ms", "Only points that are later than this, in ms since the epoch."),),
    ),
    Route(
        "GET",
        "/v1/job/lost",
        "lost",
        evidence.LostAnswer,
        "What steps have dropped, with samples of the records.",
        "lost",
        problems=(503,),
    ),
    Route(
        "GET",
        "/v1/job/logs",
        "logs",
        evidence.LogsAnswer,
        "The last lines of the log of the coordinator and of the workers.",
        problems=(400,),
        query=(("after", "Only lines whose number is larger than this."),),
        optional=(("level", _LOG_LEVEL),),
    ),
    Route(
        "GET",
        "/v1/job/metrics",
        "metrics",
        answers.MetricsAnswer,
        "The metrics of the coordinator's process, and the endpoints of all processes.",
        "metrics",
    ),
    Route(
        "GET",
        "/v1/job/state",
        "states",
        state_answers.StatesAnswer,
        "The states that can be read by key.",
        "states",
        queries=True,
        problems=(409, 503),
    ),
    Route(
        "GET",
        "/v1/job/state/{state}",
        "query",
        state_answers.QueryAnswer,
        "The value of a state for a key, read between two batches of the subtask that has the key.",
        queries=True,
        problems=(400, 404, 409, 500, 503),
        texts=(("key", _KEY),),
        optional=(("level", _LEVEL),),
    ),
    Route(
        "GET",
        "/v1/job/state/{state}/rows",
        "rows",
        state_answers.RowsAnswer,
        "The values of a state for several keys. Those of the level `committed` are of one checkpoint.",
        queries=True,
        problems=(400, 404, 409, 500, 503),
        texts=(("key", f"May be repeated. {_KEY}"),),
        optional=(("level", _LEVEL),),
    ),
    Route(
        "GET",
        "/v1/job/state/{state}/owners",
        "owners",
        state_answers.OwnersAnswer,
        "The workers that have the key groups of a state, for clients that read it there directly.",
        queries=True,
        problems=(404, 409, 503),
    ),
    Route(
        "GET",
        "/v1/job/state/{state}/changes",
        "changes",
        None,
        "The values of some keys and then each change of them, as server-sent events `change` with a "
        "ChangesAnswer. The id of an event is for `Last-Event-ID`. The event `ended` comes with the end "
        "of the job, and `problem` if the values can be read no more.",
        queries=True,
        problems=(400, 404, 409, 500, 503),
        texts=(("key", f"May be repeated. {_KEY}"),),
        optional=(("level", _CHANGES_LEVEL),),
        media="text/event-stream",
        events=state_answers.ChangesAnswer,
    ),
    Route(
        "GET",
        "/v1/job/state/{state}/scan",
        "scan",
        state_answers.ScanAnswer,
        "Some rows of a state, and a token for the next. Those of the level `committed` are all of one "
        "checkpoint. As an Arrow stream, the token is the header `Headgate-Next`.",
        queries=True,
        problems=(400, 404, 409, 410, 500, 503),
        query=(("limit", "The most rows; without it as many as the job allows."),),
        optional=(
            ("level", _LEVEL),
            ("from", f"Only keys from this one on. {_KEY}"),
            ("to", f"Only keys before this one. {_KEY}"),
            (
                "prefix",
                "Only texts that begin so; or a JSON array of the first columns of the key.",
            ),
            (
                "next",
                "The token of the page before; the other parameters but `limit` do not count then.",
            ),
        ),
        binary=ARROW_STREAM,
    ),
    Route(
        "GET",
        "/v1/job/events",
        "events",
        None,
        "What happens to the job, as server-sent events: first what is remembered, then what comes.",
        problems=(503,),
        media="text/event-stream",
    ),
    Route("GET", "/v1/openapi.json", "openapi", None, "This document."),
    *(_operation(verb, body) for verb, body in VERBS.items()),
    Route(
        "GET",
        "/v1/operations",
        "operations",
        answers.OperationsAnswer,
        "The operations that the coordinator remembers, oldest first.",
    ),
    Route(
        "GET",
        "/v1/operations/{trigger_id}",
        "operation",
        answers.OperationAnswer,
        "How far an operation is.",
        problems=(400, 404),
        query=(
            (
                "wait_s",
                f"Answer only once it has ended, or after this number of seconds (0 to {WAIT_S_MAX}).",
            ),
        ),
    ),
)
