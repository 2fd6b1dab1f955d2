"""`headgate k8s`: the processes that run in a Kubernetes cluster, and the verbs of `kubectl headgate`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from ..errors import HeadgateError, UsageError
from ..runtime.cli.console import report
from .kubectl import verbs
from .kubectl.options import extra_of
from .objects import Settings
from .worker_process import GRACE_S

_PODS: Final = "Processes of pods"
TERMINATION_LOG: Final = Path("/dev/termination-log")
app = typer.Typer(
    name="headgate k8s",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _failed(error: HeadgateError, code: int | None = None) -> typer.Exit:
    """Write the error to the log, and to the file that Kubernetes copies into the status of the pod.

    The exit code is `code`. Without one it is 2 for a mistake of the user, and 1 for any other error.
    """
    typer.echo(f"error: {error}", err=True)
    # Outside of a pod this file does not exist, and it is not made.
    with contextlib.suppress(OSError), TERMINATION_LOG.open("r+", encoding="utf-8") as said:
        said.truncate()
        said.write(str(error))
    if code is None:
        code = 2 if isinstance(error, UsageError) else 1
    return typer.Exit(code)


@app.callback()
def _k8s() -> None:
    """Run StreamJobs on Kubernetes."""


verbs.add_to(app)
plugin = typer.Typer(
    name="kubectl headgate",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@plugin.callback()
def _kubectl() -> None:
    """Look at StreamJobs, and change what they do."""


verbs.add_to(plugin)


def kubectl() -> None:
    """Entry point of `kubectl-headgate`, which kubectl runs as `kubectl headgate`."""
    try:
        plugin(prog_name="kubectl headgate")
    except Exception as error:
        sys.exit(report(error))


@app.command("operator", rich_help_panel=_PODS)
def operator(
    host: Annotated[str, typer.Option(help="Address that both ports listen on.")] = "127.0.0.1",
    health_port: Annotated[int, typer.Option(help="Port of /healthz and /readyz.")] = 8081,
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics.")] = 8080,
    default_image: Annotated[
        str, typer.Option(help="Image of StreamJobs that name no image.")
    ] = "headgate",
    watch_namespaces: Annotated[
        str, typer.Option(help="Namespaces with commas between them; default: the whole cluster.")
    ] = "",
    metrics_from: Annotated[
        str | None,
        typer.Option(
            help="Labels `name=value,...` of the namespaces that may read the metrics of jobs; "
            "empty: all namespaces; without the option: none."
        ),
    ] = None,
    poll_seconds: Annotated[
        int,
        typer.Option(min=1, help="Time between two looks at a job at rest, for its status."),
    ] = 15,
    leader_elect: Annotated[
        bool, typer.Option("--leader-elect", help="Act only while holding the Lease.")
    ] = False,
    lease_name: Annotated[str, typer.Option(help="Name of the Lease.")] = "headgate-operator",
) -> None:
    """Watch StreamJobs and StreamSnapshots, and do what they ask for, until SIGTERM."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        code = asyncio.run(_operator(
            host, health_port, metrics_port, default_image, watch_namespaces, metrics_from,
            poll_seconds, lease_name if leader_elect else "",
        ))  # fmt: skip
    except HeadgateError as error:
        raise _failed(error) from None
    raise typer.Exit(code)


class Start(StrEnum):
    """The state that a run begins with."""

    LATEST = "latest"
    PATH = "path"
    NOTHING = "nothing"


@app.command("head", rich_help_panel=_PODS)
def head(
    job: Annotated[Path, typer.Option(help="The manifest of the StreamJob.")],
    run_id: Annotated[str, typer.Option(help="The run: the uid of the StreamJob, and a number.")],
    parallelism: Annotated[
        int, typer.Option(min=1, help="Number of subtasks of steps that do not set their own.")
    ],
    start: Annotated[
        Start,
        typer.Option(
            help="`latest` is the newest checkpoint in the job log, `path` that of --path."
        ),
    ] = Start.LATEST,
    path: Annotated[
        str, typer.Option(help="A savepoint, or the directory of a job's checkpoints.")
    ] = "",
    allow_non_restored_state: Annotated[
        bool,
        typer.Option("--allow-non-restored-state", help="Drop state that no step claims any more."),
    ] = False,
    ray_address: Annotated[
        str,
        typer.Option(
            help="Address of a Ray cluster that this pod joins; default: it is the head of a new one."
        ),
    ] = "",
    gcs_volume: Annotated[
        Path | None,
        typer.Option(help="Directory in which Ray keeps its control store; default: in memory."),
    ] = None,
) -> None:
    """Be the head of a job: the head of Ray, and the coordinator in the same process.

    If it is started again with the same run id, it goes on with the run. When the job has ended, it
    answers requests about the end until SIGTERM. SIGTERM before that takes a checkpoint, and leaves the
    run to the next start.
    """
    if start is Start.PATH and not path:
        typer.echo("error: --start path needs --path", err=True)
        raise typer.Exit(2)
    from ..runtime.cli.run import configure_logging
    from .head import HeadRun, exit_code
    from .head_process import OwnRay, described, run

    configure_logging(logging.INFO)
    wanted = HeadRun(
        "",
        "",
        run_id,
        parallelism,
        start.value,
        path,
        allow_non_restored_state,
    )
    try:
        own = OwnRay(_pod_ip(), ray_address, gcs_volume)
        code = asyncio.run(run(job, described(job, wanted), own))
    except HeadgateError as error:
        raise _failed(error, exit_code(error)) from None
    raise typer.Exit(code)


@app.command("worker", rich_help_panel=_PODS)
def worker(
    head: Annotated[str, typer.Option(help="Host name of the head of Ray.")],
    slots: Annotated[
        int, typer.Option(min=1, help="Number of subtasks of a step that this pod hosts.")
    ] = 1,
    group: Annotated[
        str, typer.Option(help="Slot sharing group of these slots; empty: the job has only one.")
    ] = "",
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that workers may take to leave after SIGTERM.")
    ] = GRACE_S,
) -> None:
    """Be one node of Ray for the workers of a job, until SIGTERM.

    After SIGTERM the workers move their tasks to other pods, with a checkpoint; then Ray stops.
    """
    from .worker_process import Options, run

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    raise typer.Exit(asyncio.run(run(Options(head, _pod_ip(), slots, grace, group))))


def _pod_ip() -> str:
    """Return the IP of this pod, from the environment."""
    pod_ip = os.environ.get("HEADGATE_POD_IP", "")
    if not pod_ip:
        typer.echo("error: HEADGATE_POD_IP is not set: it has to be the IP of the pod", err=True)
        raise typer.Exit(2)
    return pod_ip


@app.command("fetch-code", rich_help_panel=_PODS)
def fetch_code(
    address: Annotated[
        str, typer.Argument(help="Address of a zip file: s3://bucket/code.zip, or a path.")
    ],
    to: Annotated[Path, typer.Option(help="An existing directory. Its content is deleted first.")],
    job: Annotated[
        Path, typer.Option(help="The manifest of the StreamJob, for its options of S3.")
    ],
) -> None:
    """Unpack the zip file with the code of a job onto the module path of its pod."""
    from .code import fetch_code as fetch
    from .delete_state import state_place

    try:
        options = state_place(_manifest(job), str(job), os.environ).options
        unpacked = asyncio.run(fetch(address, to, options))
    except HeadgateError as error:
        raise _failed(error) from None
    typer.echo(f"unpacked {unpacked.files:,} files, {unpacked.size_bytes:,} bytes, from {address}")


@app.command("delete-state", rich_help_panel=_PODS)
def delete_state(
    job: Annotated[Path, typer.Option(help="The manifest of the StreamJob.")],
    uid: Annotated[str, typer.Option(help="The uid of the StreamJob whose state is deleted.")],
) -> None:
    """Delete checkpoints and log of a StreamJob that is gone. Savepoints stay.

    State that a StreamJob with another uid went on with is left alone: exit code 1.
    """
    from .delete_state import delete_state as delete
    from .delete_state import state_place

    try:
        place = state_place(_manifest(job), str(job), os.environ)
        if not place.storage:
            typer.echo(f"job {place.job} has no checkpoint storage: there is no state to delete")
            return
        place.check_mounted()
        deleted = asyncio.run(delete(place, uid))
    except HeadgateError as error:
        raise _failed(error) from None
    typer.echo(f"job {place.job}: {deleted}")


def _manifest(path: Path) -> str:
    """Return the text of a manifest. Raises UsageError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"manifest cannot be read path=`{path}`: {error}") from None


async def _operator(
    host: str,
    health_port: int,
    metrics_port: int,
    default_image: str,
    watch_namespaces: str,
    metrics_from: str | None,
    poll_seconds: int,
    lease: str,
) -> int:
    with extra_of("the operator"):
        from .operator.process import Options, run
    namespace = os.environ.get("POD_NAMESPACE", "default")
    settings = Settings(
        default_image=default_image,
        operator_namespace=namespace,
        metrics_from=None if metrics_from is None else _labels(metrics_from),
        poll_ms=1_000 * poll_seconds,
    )
    return await run(
        Options(
            host=host,
            health_port=health_port,
            metrics_port=metrics_port,
            namespaces=tuple(part for part in watch_namespaces.split(",") if part),
            lease=lease,
            namespace=namespace,
            instance=os.environ.get("POD_NAME", f"{socket.gethostname()}-{os.getpid()}"),
            settings=settings,
        )
    )


def _labels(text: str) -> dict[str, str]:
    """Parse labels in the form `name=value,name=value`. Raises UsageError if they have another form."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise UsageError(f"--metrics-from takes name=value,..., not {text!r}")
    return {name: value for name, _, value in pairs}
