"""The verbs for users, such as `headgate k8s status`, which is also `kubectl headgate status`."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
import typer
import yaml

from ...api.manifest.model import API_VERSION, KIND
from ...errors import JobError, UsageError
from ...operators.durations import parse_duration
from ...runtime.cli.checkpoints import print_history, print_one
from ...runtime.cli.console import CANCELLED, print_table, say
from ...runtime.cli.foreground import run_until_interrupted
from ...runtime.cli.listing import print_failures
from ..ports import REST
from . import views
from .options import Access, JobName, Output, OutputFormat, Timeout, extra_of, of_cluster

if TYPE_CHECKING:
    from .cluster import JobCluster

T = TypeVar("T")
_PANEL: Final = "Jobs of a cluster"
_WAIT: Final = "15m"


def status(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One StreamJob; default: all.")
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show the jobs of all namespaces.")
    ] = False,
    output: OutputFormat = Output.TABLE,
    *,
    access: Access,
) -> None:
    """Show StreamJobs: phase, message, last checkpoint; of one also conditions, pods and savepoints."""
    if name is not None and all_namespaces:
        raise UsageError(
            "the details of a StreamJob can be shown for one namespace only",
            fix="use -n instead of -A",
        )

    async def ask(cluster: JobCluster) -> list[views.JobView]:
        if name is None:
            return [views.job_view(job) for job in await cluster.jobs()]
        job = await cluster.job(name)
        missing: list[str] = []
        pods = await _if_allowed(cluster.pods(name), missing)
        view = views.job_view(job, pods, await _if_allowed(cluster.snapshots(), missing))
        return [msgspec.structs.replace(view, notes=[*view.notes, *missing])]

    found = _run(ask, access, all_namespaces=all_namespaces)
    if output is not Output.TABLE:
        _print_data(found[0] if name is not None else found, output)
    elif name is not None:
        _print_job(found[0])
    elif found:
        _print(views.jobs_table(found, _now_ms(), namespaces=all_namespaces))
    else:
        typer.echo("there is no StreamJob")


def logs(
    name: JobName,
    role: Annotated[str, typer.Option(help="`head` or `worker`; default: the logs of both.")] = "",
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Follow the logs until the job is at rest, or Ctrl-C."),
    ] = False,
    previous: Annotated[
        bool,
        typer.Option(
            "--previous", "-p", help="Show the logs of the containers before the last restart."
        ),
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Number of last lines of each pod; default: all.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Show only lines that are not older than this."),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Begin each line with its time.")
    ] = False,
    *,
    access: Access,
) -> None:
    """Print the logs of the head and of the workers, each line with the name of its pod."""
    with extra_of("`headgate k8s logs`"):
        from .logs import ROLES, Wanted, follow_logs, print_logs
    if role not in ("", *ROLES):
        raise UsageError(f"there is no such role role=`{role}`", fix=f"one of {', '.join(ROLES)}")
    if follow and previous:
        raise UsageError("containers that have ended cannot be followed", fix="keep -f or -p")
    since_s = None if since is None else max(1, parse_duration(since, "--since") // 1000)
    wanted = Wanted(role, previous, tail, since_s, timestamps)

    async def ask(cluster: JobCluster) -> None:
        printing = follow_logs if follow else print_logs
        await printing(cluster, name, wanted, typer.echo, say)

    _run(ask, access)


def checkpoints(
    name: JobName,
    number: Annotated[
        int | None,
        typer.Argument(metavar="[ID]", help="Show one checkpoint, with all its subtasks."),
    ] = None,
    output: OutputFormat = Output.TABLE,
    *,
    access: Access,
) -> None:
    """Show the last checkpoints of a job that runs, as its coordinator knows them."""
    with extra_of("`headgate k8s checkpoints`"):
        from .forward import coordinator

    async def ask(cluster: JobCluster) -> msgspec.Struct:
        async with coordinator(cluster, name) as client:
            if number is None:
                return await client.checkpoints()
            return await client.checkpoint_detail(number)

    answer = _run(ask, access)
    found = msgspec.to_builtins(answer)
    if output is not Output.TABLE:
        _print_data(answer, output)
    elif number is not None:
        print_one(found)
    elif found["history"]:
        print_history(found)
    else:
        typer.echo(f"job {name}: no checkpoint yet")


def history(
    name: JobName,
    details: Annotated[
        bool, typer.Option("--details", help="Show the tracebacks of user functions.")
    ] = False,
    output: OutputFormat = Output.TABLE,
    *,
    access: Access,
) -> None:
    """Show why a job failed since its coordinator began, what followed, and calls that do not return."""
    with extra_of("`headgate k8s history`"):
        from .forward import coordinator

    async def ask(cluster: JobCluster) -> msgspec.Struct:
        async with coordinator(cluster, name) as client:
            return await client.exceptions()

    answer = _run(ask, access)
    if output is Output.TABLE:
        print_failures(name, msgspec.to_builtins(answer), details=details)
    else:
        _print_data(answer, output)


def savepoint(
    name: JobName,
    snapshot: Annotated[
        str, typer.Option("--name", help="Name of the StreamSnapshot; default: job and time.")
    ] = "",
    directory: Annotated[
        str, typer.Option(help="Directory of the savepoint; default: as the StreamJob says.")
    ] = "",
    native: Annotated[
        bool,
        typer.Option(
            "--native",
            help="Keep the files of the state backend: faster, but only this backend reads them.",
        ),
    ] = False,
    stop_job: Annotated[
        bool, typer.Option("--stop", help="The job ends with this savepoint.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it is complete, and print its path.")
    ] = False,
    timeout: Timeout = _WAIT,
    *,
    access: Access,
) -> None:
    """Take a savepoint: make a StreamSnapshot. Deleting that does not delete the savepoint."""
    wait_ms = parse_duration(timeout, "--timeout")
    spec: dict[str, Any] = {"jobRef": {"name": name}, "format": "Native" if native else "Canonical"}
    spec |= {"directory": directory} if directory else {}
    spec |= {"stopJob": True} if stop_job else {}
    now = datetime.datetime.now(datetime.UTC)
    made_name = snapshot or f"{name}-{now:%Y%m%d-%H%M%S}"

    async def ask(cluster: JobCluster) -> views.SnapshotView:
        from .cluster import wait_until

        await cluster.job(name)
        metadata = {"name": made_name, "namespace": cluster.namespace}
        made = {"apiVersion": API_VERSION, "kind": "StreamSnapshot", "metadata": metadata}
        view = views.snapshot_view(await cluster.create_snapshot(made | {"spec": spec}))
        say(f"streamsnapshot {made_name} is asked for")
        if not wait:
            return view

        async def look() -> views.SnapshotView:
            return views.snapshot_view(await cluster.snapshot(made_name))

        return await wait_until(
            look, lambda view: view.completed != "", _told_of_snapshot, wait_ms, say
        )

    view = _run(ask, access)
    if not wait:
        say(f"`headgate k8s snapshots {name}` shows how far it is")
    elif view.phase == "Completed":
        typer.echo(view.path)
    else:
        raise JobError(f"the savepoint is {view.phase} name=`{made_name}`: {view.message}")


def snapshots(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Only those of one StreamJob; default: all."),
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show those of all namespaces.")
    ] = False,
    output: OutputFormat = Output.TABLE,
    *,
    access: Access,
) -> None:
    """List StreamSnapshots, the newest first: periodic savepoints, and those that somebody asked for."""

    async def ask(cluster: JobCluster) -> list[views.SnapshotView]:
        found = views.sorted_snapshots(map(views.snapshot_view, await cluster.snapshots()))
        mine = [each for each in found if name in (None, each.job)]
        if name is not None and not mine:
            await cluster.job(name)  # a job that no longer exists may have snapshots
        return mine

    found = _run(ask, access, all_namespaces=all_namespaces)
    if output is not Output.TABLE:
        _print_data(found, output)
    elif found:
        _print(views.snapshots_table(found, _now_ms()))
    else:
        typer.echo("there is no StreamSnapshot")


def explain(
    name: JobName,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Print the plan as a Mermaid flowchart instead.")
    ] = False,
    *,
    access: Access,
) -> None:
    """Print what `headgate explain` says of the StreamJob's manifest.

    Code of the job's own has to be installed here. Environment variables have the values of
    `kubernetes.env`; those of Secrets stay `${NAME}`.
    """
    from ...runtime.explain import mermaid_plan
    from ...runtime.job import runnable
    from ...runtime.manifest import load_job

    async def ask(cluster: JobCluster) -> dict[str, Any]:
        return await cluster.job(name)

    found = _run(ask, access)
    text, environment = manifest_of(found)
    job = load_job(text, env=environment)
    typer.echo(mermaid_plan(runnable(job).spec()) if mermaid else job.explain())


def suspend(
    name: JobName,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no pod is left.")] = False,
    timeout: Timeout = _WAIT,
    *,
    access: Access,
) -> None:
    """Stop a job as `upgrade.mode` says, and take its pods away. Sets `state: Suspended`."""
    patch = {"kubernetes": {"state": "Suspended"}}
    _change(name, patch, "Suspended", wait, timeout, access)
    typer.echo(f"streamjob {name} {'is suspended' if wait else 'will be suspended'}")


def resume(
    name: JobName,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job runs.")] = False,
    timeout: Timeout = _WAIT,
    *,
    access: Access,
) -> None:
    """Let a suspended job go on where it was. Sets `state: Running`."""
    patch = {"kubernetes": {"state": "Running"}}
    _change(name, patch, "Running", wait, timeout, access)
    typer.echo(f"streamjob {name} {'runs' if wait else 'will run'}")


def scale(
    name: JobName,
    parallelism: Annotated[
        int, typer.Argument(min=1, help="Number of subtasks of steps that do not set their own.")
    ],
    *,
    access: Access,
) -> None:
    """Rescale a job while it runs. Sets `spec.parallelism`."""
    patch = {"parallelism": parallelism}
    _change(name, patch, "", False, _WAIT, access)
    typer.echo(f"streamjob {name} will have parallelism {parallelism}")


def port_forward(
    name: JobName,
    port: Annotated[
        int, typer.Argument(min=0, max=65535, help="Port of this machine; 0: a free one.")
    ] = REST.number,
    *,
    access: Access,
) -> None:
    """Open a port of this machine that leads to the REST API of a job, until Ctrl-C."""
    with extra_of("`headgate k8s port-forward`"):
        from .forward import Forward, head_pod

    async def ask(cluster: JobCluster) -> None:
        from ..objects import TOKEN_KEY, token_name

        pod = await head_pod(cluster, name)
        forward = Forward(cluster.api, cluster.namespace, pod, REST.number)
        open_port = await forward.listen(port=port)
        typer.echo(f"http://127.0.0.1:{open_port} is the REST API of {name}, in pod {pod}")
        say(
            f"it takes the token of the job: kubectl get secret {token_name(name)} "
            f"-n {cluster.namespace} -o jsonpath='{{.data.{TOKEN_KEY}}}' | base64 -d"
        )
        try:
            await forward.ended()
        finally:
            await forward.close()

    _run(ask, access)


def add_to(app: typer.Typer) -> None:
    """Add these verbs as commands to `app`."""
    for verb in (
        status, logs, checkpoints, history, savepoint, snapshots, explain, suspend, resume, scale
    ):  # fmt: skip
        app.command(verb.__name__, rich_help_panel=_PANEL)(of_cluster(verb))
    app.command("stop", rich_help_panel=_PANEL, help="The same as suspend.")(of_cluster(suspend))
    app.command("port-forward", rich_help_panel=_PANEL)(of_cluster(port_forward))


def manifest_of(job: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the manifest that a StreamJob was made of, and the values of its variables in the pods."""
    metadata, spec = job["metadata"], job.get("spec") or {}
    named = {key: metadata[key] for key in ("name", "namespace") if key in metadata}
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": named, "spec": spec}
    said = (spec.get("kubernetes") or {}).get("env") or {}
    environment = {
        name: value if isinstance(value, str) else f"${{{name}}}" for name, value in said.items()
    }
    return yaml.safe_dump(manifest, sort_keys=False), environment


def _run(
    ask: Callable[[JobCluster], Coroutine[Any, Any, T]],
    access: Access,
    *,
    all_namespaces: bool = False,
) -> T:
    with extra_of("`headgate k8s`"):
        from .cluster import connected

    async def run() -> T:
        async with connected(access, all_namespaces=all_namespaces) as cluster:
            return await ask(cluster)

    try:
        return run_until_interrupted(run())
    except KeyboardInterrupt:
        raise typer.Exit(CANCELLED) from None


async def _if_allowed(asked: Awaitable[Sequence[T]], missing: list[str]) -> Sequence[T]:
    """Return the result of a request; without the right for it nothing, with a line in `missing`."""
    from .cluster import NotAllowedError

    try:
        return await asked
    except NotAllowedError as error:
        missing.append(str(error))
        return []


def _change(
    name: str, spec: dict[str, Any], phase: str, wait: bool, timeout: str, access: Access
) -> None:
    """Patch a StreamJob, and wait for a phase if that is wanted."""
    wait_ms = parse_duration(timeout, "--timeout")

    async def ask(cluster: JobCluster) -> None:
        from .cluster import wait_until

        await cluster.change(name, spec)
        if not wait:
            return

        async def look() -> views.JobView:
            return views.job_view(await cluster.job(name))

        await wait_until(
            look, lambda view: views.has_come_to(view, phase), _told_of_job, wait_ms, say
        )

    _run(ask, access)


def _told_of_job(job: views.JobView) -> str:
    return f"{job.phase}: {job.message}" if job.message else job.phase


def _told_of_snapshot(snapshot: views.SnapshotView) -> str:
    return f"{snapshot.phase}: {snapshot.message}" if snapshot.message else snapshot.phase


def _print_job(job: views.JobView) -> None:
    now_ms = _now_ms()
    for line in views.job_lines(job, now_ms):
        typer.echo(line)
    if job.conditions:
        typer.echo("")
        _print(views.conditions_table(job.conditions, now_ms), fold=True)
    if job.pods:
        typer.echo("")
        _print(views.pods_table(job.pods, now_ms))
        for line in views.trouble_lines(job.pods):
            typer.echo(line)
    if job.snapshots:
        typer.echo("")
        _print(views.snapshots_table(job.snapshots, now_ms), fold=True)


def _print(table: views.Table, *, fold: bool = False) -> None:
    print_table(table.titles, table.rows, right=table.right, fold=fold)


def _print_data(found: object, output: Output) -> None:
    plain = msgspec.to_builtins(found)
    if output is Output.JSON:
        typer.echo(json.dumps(plain, indent=2))
    else:
        typer.echo(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).rstrip())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
