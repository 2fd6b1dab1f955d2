"""The requests of the verbs to the API server, with errors that say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeVar

from ...errors import HeadgateError, JobError, JobNotFound, UsageError
from ...operators.durations import format_duration
from ..objects import JOB, token_name
from ..operator.api import Api, ApiError
from ..operator.kinds import POD, STREAM_JOB, STREAM_SNAPSHOT, Kind
from .options import Access

MANAGER: Final = "kubectl-headgate"
POLL_S: Final = 1.0
"""The interval at which an object is checked while a verb waits for it."""
Object: TypeAlias = dict[str, Any]
T = TypeVar("T")
_FORBIDDEN: Final = re.compile(
    r'cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'( in the namespace "(?P<namespace>[^"]+)"| at the cluster scope)?'
)


class NotAllowedError(UsageError):
    """A right is missing. The error names it."""


class JobCluster:
    """The StreamJobs of one namespace, or of all of them."""

    def __init__(self, api: Api, namespace: str) -> None:
        """
        Args:
            api: connected.
            namespace: empty: all of them.
        """
        self.api = api
        self.namespace = namespace

    async def jobs(self) -> list[Object]:
        """Return all StreamJobs."""
        return await self._list(STREAM_JOB)

    async def job(self, name: str) -> Object:
        """Return one StreamJob.

        Raises:
            JobNotFound: there is none of this name.
        """
        with understood():
            found = await self.api.get(STREAM_JOB, self.namespace, name)
        if found is not None:
            return found
        names = [str(each["metadata"]["name"]) for each in await self.jobs()]
        known = f"StreamJobs there: {', '.join(names)}" if names else "there is no StreamJob at all"
        raise JobNotFound(
            f"no such StreamJob name=`{name}` namespace=`{self.namespace}`",
            fix=f"{known}; another namespace is chosen with -n",
        )

    async def pods(self, job: str = "") -> list[Object]:
        """Return the pods of a job, or of all jobs."""
        return await self._list(replace(POD, selector=f"{JOB}={job}" if job else JOB))

    async def snapshots(self) -> list[Object]:
        """Return all StreamSnapshots."""
        return await self._list(STREAM_SNAPSHOT)

    async def snapshot(self, name: str) -> Object:
        """Return one StreamSnapshot.

        Raises:
            JobError: there is none of this name.
        """
        with understood():
            found = await self.api.get(STREAM_SNAPSHOT, self.namespace, name)
        if found is None:
            raise JobError(f"the StreamSnapshot is gone name=`{name}` namespace=`{self.namespace}`")
        return found

    async def create_snapshot(self, made: Object) -> Object:
        """Request a savepoint or a checkpoint."""
        with understood():
            return await self.api.create(made, STREAM_SNAPSHOT)

    async def change(self, job: str, spec: Mapping[str, Any]) -> Object:
        """Merge fields into the `spec` of an existing StreamJob."""
        await self.job(job)
        with understood():
            return await self.api.merge(STREAM_JOB, self.namespace, job, {"spec": dict(spec)})

    async def _list(self, kind: Kind) -> list[Object]:
        with understood():
            found, _ = await self.api.list(kind, self.namespace)
        return found


@contextlib.asynccontextmanager
async def connected(access: Access, *, all_namespaces: bool = False) -> AsyncIterator[JobCluster]:
    """The cluster of a kubeconfig file, for the time of the block.

    Raises:
        UsageError: there is no such configuration.
    """
    try:
        api = await Api.from_environment(
            kubeconfig=access.kubeconfig, context=access.context, manager=MANAGER
        )
    except ApiError as error:
        raise UsageError(
            error.message,
            fix="name a file with --kubeconfig or KUBECONFIG, and one of its contexts with --context",
        ) from None
    async with api:
        yield JobCluster(api, "" if all_namespaces else access.namespace or api.namespace)


async def wait_until(
    look: Callable[[], Awaitable[T]],
    done: Callable[[T], bool],
    told: Callable[[T], str],
    timeout_ms: int,
    say: Callable[[str], None],
) -> T:
    """Look at an object again and again until it is done; print its progress whenever that changes.

    Args:
        look: returns the object, which the other functions get.
        done: true if there is nothing to wait for.
        told: returns the text to print.
        timeout_ms: the longest time to wait.
        say: prints a line.

    Raises:
        JobError: it is not done in time. The operation goes on.
    """
    said = ""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            while True:
                seen = await look()
                if (text := told(seen)) != said:
                    say(text)
                    said = text
                if done(seen):
                    return seen
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise JobError(
            f"not done after {format_duration(timeout_ms)}: {said or 'there was no answer'}",
            fix="it goes on in the cluster; wait longer with --timeout",
        ) from None


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Replace refusals of the API server by errors that say what to do."""
    try:
        yield
    except ApiError as error:
        raise explained(error) from None


def explained(error: ApiError) -> HeadgateError:
    """Return the error for a refusal of the API server, with the way to correct it."""
    answer = error.answer or error.message
    match error.status:
        case 0:
            return JobError(answer, fix="is this the right context? `kubectl cluster-info` tells")
        case 401:
            return UsageError(
                "the API server does not know you: the credentials of the kubeconfig file are wrong or old",
                fix="log in to the cluster again, or choose another --context",
            )
        case 403:
            return _forbidden(answer)
        case 404 if "page not found" in answer or "could not find the requested resource" in answer:
            return UsageError(
                "the cluster has no StreamJobs: their resource definitions are not installed",
                fix="helm install headgate ./helm/headgate --namespace headgate --create-namespace",
            )
        case 422:
            return UsageError(answer, fix="nothing was changed")
    return JobError(f"the API server refused: {answer}")


def _forbidden(answer: str) -> NotAllowedError:
    """Return the missing right as the rule of a Role."""
    found = _FORBIDDEN.search(answer)
    if found is None:
        return NotAllowedError(f"the API server forbids it: {answer}")
    verb, resource, group = found["verb"], found["resource"], found["group"]
    return lacking(verb, resource, group, found["namespace"] or "")


def lacking(verb: str, resource: str, group: str, namespace: str) -> NotAllowedError:
    """Return an error that names the missing rule of RBAC."""
    named = f"{resource.partition('/')[0]}.{group}" if group else resource.partition("/")[0]
    where = f" in namespace {namespace}" if namespace else " in the whole cluster"
    below = resource.partition("/")[2]
    asked = f"{verb} {named}{f' --subresource={below}' if below else ''}"
    check = f"kubectl auth can-i {asked}{f' -n {namespace}' if namespace else ' -A'}"
    return NotAllowedError(
        f"you may not {verb} {resource}{where}",
        fix=f"ask for a role with: apiGroups: [{group!r}], resources: [{resource!r}], verbs: [{verb!r}]; "
        f"`{check}` tells whether you have it",
    )


def no_token(error: ApiError, namespace: str, job: str) -> HeadgateError:
    """Return the error of a job's token that cannot be read."""
    told = explained(error)
    if error.status != 403:
        return told
    return UsageError(
        f"the token of the job's REST API cannot be read job=`{job}`: {told.message}",
        fix=f"{told.fix}; the token is in the Secret {token_name(job)} of namespace {namespace}, or in the "
        "one that kubernetes.ray.tokenSecretRef names",
    )
