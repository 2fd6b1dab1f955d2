"""The short verbs: `stop`, `cancel`, `rescale` and `query` of a running job; and those of a file."""

from __future__ import annotations

import contextlib
import json
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ...errors import HeadgateError, ManifestErrors, UsageError
from ...operators.clock import SystemClock
from ...operators.durations import parse_duration
from .console import FAILED, USAGE, print_table, say, texts
from .jobs import request
from .load import (
    File,
    JobName,
    Mode,
    OnCluster,
    Parallelism,
    Settings,
    Storage,
    TokenFile,
    load_file,
    where,
    with_mode,
)

if TYPE_CHECKING:
    from ...operators.graph import Node
    from ...operators.sink import Sink
    from ...operators.source import Source
    from ..job import Job
    from ..query import QueryClient

Native = Annotated[
    bool,
    typer.Option(
        "--native",
        help="Keep the files of the state backend: faster, but only this backend reads them.",
    ),
]
Key = Annotated[
    str | None,
    typer.Argument(
        metavar="KEY",
        help="The key: its text, or a JSON object with a member for each key column.",
    ),
]
Level = Annotated[
    str | None,
    typer.Option(
        "--level",
        metavar="LEVEL",
        help="`live`, or `committed`: as of the newest complete checkpoint. Left out: `live`, and "
        "`committed` with --follow.",
    ),
]
Prefix = Annotated[
    str | None,
    typer.Option(
        "--prefix",
        metavar="TEXT",
        help="The keys that begin so; or a JSON array of the first key columns.",
    ),
]


def stop(
    job: JobName,
    savepoint: Annotated[
        str | None,
        typer.Option(
            "--savepoint",
            metavar="DIR",
            help="Take a savepoint first, in a new directory below DIR (`default`: the one of the "
            "option execution.checkpointing.savepoint-dir).",
        ),
    ] = None,
    drain: Annotated[
        bool,
        typer.Option(
            "--drain",
            help="Sources end as if their data had: windows fire. Not for a job that goes on later.",
        ),
    ] = False,
    native: Native = False,
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Stop a running job with a final checkpoint; run it again to resume from there."""
    place = where(storage, cluster, token_file, settings)
    arguments: dict[str, Any] = {"drain": drain, "native": native}
    if savepoint is not None:
        arguments["savepoint"] = target(savepoint)
    done = request(job, "stop", place, **arguments)
    if done.get("savepoint"):
        typer.echo(f"savepoint: {done['savepoint']}")
    if done.get("checkpoint"):
        taken = f"checkpoint {done['checkpoint']} ({done['duration_ms']} ms)"
        typer.echo(f"job {job} stopped with {taken}; run it again to resume from there")
    else:
        typer.echo(f"job {job} stopped without a checkpoint")


def target(directory: str) -> str:
    """Return a directory as an address for the job, which runs elsewhere; empty: that of the option."""
    from ..job_settings import absolute

    return "" if directory == "default" else absolute(directory)


def cancel(
    job: JobName,
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Cancel a running job at once, without a checkpoint."""
    place = where(storage, cluster, token_file, settings)
    done = request(job, "cancel", place)
    last = f"its last checkpoint is {done['checkpoint']}" if done["checkpoint"] else "no checkpoint"
    typer.echo(f"job {job} cancelled; {last}")


def top(
    job: JobName,
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Show a running job as a live table, until it ends. Ctrl-C leaves; the job goes on."""
    from .top import follow

    raise typer.Exit(follow(job, where(storage, cluster, token_file, settings)))


def logs(
    job: JobName,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Go on with each new line until the job ends."),
    ] = False,
    level: Annotated[
        str,
        typer.Option("--level", help="Of this level and more severe: debug, info, warning, error."),
    ] = "info",
    worker: Annotated[
        str,
        typer.Option("--worker", help="Of processes with this in their name, or `coordinator`."),
    ] = "",
    step: Annotated[str, typer.Option("--step", help="Lines that name this step.")] = "",
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, help="The most lines of those that are there.")
    ] = 100,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each line as a JSON object.")
    ] = False,
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Print the last lines of a running job's log, of its coordinator and of all workers."""
    from ..observe.recent_logs import LEVELS
    from .logs import Wanted, show
    from .logs import follow as go_on

    if level.upper() not in LEVELS:
        raise UsageError(
            f"there is no such level level=`{level}`",
            fix=f"use one of {', '.join(each.lower() for each in LEVELS)}",
        )
    wanted = Wanted(level.upper(), worker, step, lines, as_json)
    place = where(storage, cluster, token_file, settings)
    raise typer.Exit((go_on if follow else show)(job, place, wanted))


def rescale(
    job: JobName,
    parallelism: Annotated[
        int,
        typer.Option(
            "-p", "--parallelism", min=1, help="Subtasks of operators that set no own number."
        ),
    ],
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Stop a running job with a checkpoint and go on at another parallelism at once."""
    place = where(storage, cluster, token_file, settings)
    done = request(job, "rescale", place, parallelism=parallelism)
    if not done["pause_ms"]:
        # The REST API takes this for a request that the coordinator before has carried out already.
        raise UsageError(
            f"nothing would change parallelism=`{parallelism}`",
            fix="operators that set their own parallelism keep it",
        )
    typer.echo(
        f"job {job} runs at parallelism {done['parallelism']} from checkpoint {done['checkpoint']}; "
        f"it paused for {done['pause_ms']} ms"
    )


def query(
    job: JobName,
    state: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Name of a queryable state. Left out: list them."),
    ] = None,
    key: Key = None,
    level: Level = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The whole answer, also if the key has no value.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="The value, and then each change of it: a line of JSON for each."
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="All keys: a line of JSON for each.")
    ] = False,
    start: Annotated[
        str | None, typer.Option("--from", metavar="KEY", help="The keys from this one on.")
    ] = None,
    stop: Annotated[
        str | None, typer.Option("--to", metavar="KEY", help="The keys before this one.")
    ] = None,
    prefix: Prefix = None,
    arrow: Annotated[
        Path | None,
        typer.Option(
            "--arrow", metavar="FILE", help="Write the keys that are found to an Arrow IPC stream."
        ),
    ] = None,
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Print what a state of a running job has for a key, or for many, as JSON; or its queryable states."""
    place = where(storage, cluster, token_file, settings)
    if state is None:
        _print_states(request(job, "states", place)["states"], as_json=as_json)
        return
    if follow and (everything or start or stop or prefix):
        raise UsageError(
            "--follow is for one key", fix="leave --all, --from, --to and --prefix out"
        )
    if follow and key is not None:
        from ..query import connect_at

        with contextlib.closing(connect_at(job, place)) as client:
            _follow(client, state, key, level or "committed", whole=as_json)
        return
    level = level or "live"
    ends = {"from": start, "to": stop, "prefix": prefix}
    given = {name: text for name, text in ends.items() if text is not None}
    if everything or given:
        if key is not None or as_json:
            raise UsageError("KEY and --json are for one key", fix="leave them out")
        from ..query import connect_at

        with contextlib.closing(connect_at(job, place)) as client:
            _scan(client, state, {"level": level, **given}, arrow)
        return
    if key is None:
        fix = "headgate query JOB NAME KEY, or --all, --from, --to or --prefix"
        raise UsageError(f"the query has no key state=`{state}`", fix=fix)
    answer = request(job, "query", place, state=state, key=key, level=level)
    if as_json:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    elif answer["found"]:
        typer.echo(json.dumps(answer["value"], ensure_ascii=False))
    else:
        say(f"{state} has nothing for this key")


def _follow(client: QueryClient, state: str, key: str, level: str, *, whole: bool) -> None:
    """Print the value of a key and each change of it, until the job has ended."""
    for change in client.follow_texts(state, [key], level):
        for row in change.rows:
            found = msgspec.to_builtins(change) if whole else row.value
            typer.echo(json.dumps(found, ensure_ascii=False))


def _scan(client: QueryClient, state: str, given: dict[str, str], arrow: Path | None) -> None:
    """Print the keys that are asked for, or write them to a file."""
    if arrow is None:
        for page in client.pages(state, given):
            for row in page.rows:
                line = {"key": row.key, "value": row.value}
                typer.echo(json.dumps(line, ensure_ascii=False))
        return
    import pyarrow as pa

    with contextlib.ExitStack() as stack:
        writer, rows = None, 0
        for stream in client.streams(state, given):
            table = pa.ipc.open_stream(stream).read_all()
            if writer is None:
                writer = stack.enter_context(pa.ipc.new_stream(str(arrow), table.schema))
            writer.write_table(table)
            rows += table.num_rows
    say(f"wrote {rows} {'row' if rows == 1 else 'rows'} to {arrow}")


def _print_states(states: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(states, indent=2))
    elif not states:
        typer.echo("the job has no queryable state")
    else:
        titles = ("state", "kind", "step", "key")
        print_table(titles, [(s["name"], s["kind"], s["step"], _key_types(s)) for s in states])


def _key_types(state: dict[str, Any]) -> str:
    types = state["key"]
    return "JSON" if types is None else ", ".join(f"{name}: {kind}" for name, kind in types.items())


def explain(
    file: File,
    parallelism: Parallelism = None,
    settings: Settings = None,
    runtime_mode: Mode = None,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Print the plan as a Mermaid flowchart instead.")
    ] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Print the plan as an SVG drawing.")] = False,
) -> None:
    """Print the logical and physical graph, chains, parallelism, key groups and guarantees.

    Of a job in batch mode, print Spark's plan.
    """
    from ..explain import mermaid_plan
    from ..job import runnable
    from ..plan_svg import svg_plan

    if mermaid and svg:
        raise UsageError("--mermaid and --svg are two forms of one plan", fix="give one of them")
    job = load_file(file, parallelism, with_mode(settings, runtime_mode))
    if mermaid or svg:
        spec = runnable(job).spec()
        typer.echo(mermaid_plan(spec) if mermaid else svg_plan(spec))
    else:
        typer.echo(job.explain())


def validate(
    file: File,
    parallelism: Parallelism = None,
    settings: Settings = None,
    connect: Annotated[
        bool,
        typer.Option(
            "--connect",
            help="Also ask the services of all sources and sinks. Nothing is created, written or "
            "acknowledged there.",
        ),
    ] = False,
    connect_timeout: Annotated[
        str,
        typer.Option(
            "--connect-timeout",
            metavar="DURATION",
            help="With --connect: the longest time to wait for all answers.",
        ),
    ] = "60s",
) -> None:
    """Check a job and print all its mistakes. Starts nothing; exit code 2 if there are any.

    With --connect, the exit code is 1 if a source or a sink could not be used from this machine.
    """
    timeout_ms = parse_duration(connect_timeout, "--connect-timeout")
    try:
        job = load_file(file, parallelism, settings)
        problems = problems_of(job)
    except ManifestErrors as errors:
        problems = list(errors.problems)
    except UsageError as error:
        problems = [error]
    for problem in problems:
        for text in texts(problem):
            say(f"error: {text}")
    if problems:
        count = len(problems)
        say(f"{file}: {count} {'mistake' if count == 1 else 'mistakes'}")
        raise typer.Exit(USAGE)
    from ..job import runnable
    from ..job_checks import pickled_states, sources_without_replay

    typer.echo(f"{file}: ok, job {job.name}")
    for text in sources_without_replay(runnable(job).graph):
        say(f"note: {text}")
    for found in pickled_states(runnable(job).graph):
        say(f"note: state is pickled, since its type is not known. {found}")
    if connect and not _print_connections(job, timeout_ms / 1000):
        raise typer.Exit(FAILED)


@dataclass
class _Answer:
    """The answer for one source or sink.

    Attributes:
        found: what was found there; None: nothing was found yet.
        error: the reason why it cannot be used.
    """

    found: str | None = None
    error: HeadgateError | None = None


def _print_connections(job: Job, timeout_s: float) -> bool:
    """Print a line for each source and sink of a job; return True if all can be used.

    All are asked at the same time, in threads. A library may not let its thread end in time, so the threads
    do not keep the process alive.

    Args:
        job: has no mistakes.
        timeout_s: the longest time to wait for all of them.
    """
    from ..job import runnable

    inside = runnable(job)
    asked: list[tuple[str, Node, threading.Thread, _Answer]] = []
    for node in inside.graph.nodes:
        for kind, connector in (("source", node.source), ("sink", node.sink)):
            if connector is not None:
                answer = _Answer()
                thread = threading.Thread(
                    target=_ask, args=(connector, inside.options, answer), daemon=True
                )
                thread.start()
                asked.append((f"{kind} `{node.name}`", node, thread, answer))
    clock = SystemClock()
    deadline = clock.monotonic() + timeout_s
    good = True
    for name, node, thread, answer in asked:
        thread.join(max(0.0, deadline - clock.monotonic()))
        if answer.error is None and answer.found is None:
            answer.error = HeadgateError(
                f"there was no answer within {timeout_s:g} s",
                fix="check the address and the firewalls; --connect-timeout waits longer",
            )
        if answer.error is None:
            typer.echo(
                f"ok: {name}: {answer.found or 'nothing to connect to'}, at {node.origin.location}"
            )
        else:
            good = False
            error = answer.error
            say(f"error: {name}: {_placed(error, node.origin.location)}")
    return good


def _placed(error: HeadgateError, where: str) -> str:
    """Return the text of an error with the place of the step, unless the error names another place.

    A place may be followed by the text of the line, which may have a password in it.
    """
    own = error.where.partition("  ")[0]
    return str(HeadgateError(error.message, where=own or where, fix=error.fix))


def _ask(connector: Source | Sink, options: dict[str, str], answer: _Answer) -> None:
    """Ask one service; runs in a thread."""
    from ...operators.connections import check_connection

    try:
        answer.found = check_connection(connector, options)
    except HeadgateError as error:
        answer.error = error
    except Exception as error:
        # Its text may have a secret, as the connector did not expect this error.
        last = traceback.extract_tb(error.__traceback__)[-1]
        answer.error = HeadgateError(
            f"the check of the connection failed with {type(error).__name__} in "
            f"{last.filename}:{last.lineno}",
            fix="this is a mistake in the connector; please report it to its author",
        )


def problems_of(job: Job) -> list[HeadgateError]:
    """Return every reason why a loaded job cannot run."""
    from ..job import runnable

    inside = runnable(job)
    found: list[HeadgateError] = list(inside.problems())
    if not found:
        inside.spec()
    return found


def options(
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
) -> None:
    """Print every option: key, type, default, meaning."""
    from ..options.registry import OPTIONS
    from ..options.registry import markdown as as_markdown

    if markdown:
        typer.echo(as_markdown(), nl=False)
        return
    for option in OPTIONS:
        typer.secho(option.key, bold=True)
        also = f" (also {', '.join(option.aliases)})" if option.aliases else ""
        typer.echo(f"    {option.type.name}, default {option.default_text()}{also}")
        typer.echo(f"    {option.doc}")
