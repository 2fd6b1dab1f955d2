"""Requests to the API server, on top of kubernetes_asyncio, for the operator and for `kubectl headgate`.

Objects stay plain mappings: the generated classes of that library do not have our resources, and need
much memory. The library is used for the configuration, its credentials, and the connection.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, final
from urllib.parse import urlencode

import aiohttp
import msgspec
import yaml
from kubernetes_asyncio import client, config

from ...errors import HeadgateError
from .kinds import EVENT, Kind

FIELD_MANAGER: Final = "headgate-operator"
NEVER: Final = "1"
"""A version that no object has: etcd begins with it, when it is empty. An apply that names a version makes
what does not exist, and is refused for what has another version, so with this one it only makes."""
PAGE: Final = 500
_LINE_BYTES_MAX: Final = 16 << 20
NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_JSON: Final = "application/json"
_MERGE: Final = "application/merge-patch+json"
_APPLY: Final = "application/apply-patch+yaml"
JsonObject: TypeAlias = dict[str, Any]


class ApiError(HeadgateError):
    """The API server refused a request, or did not answer it.

    Attributes:
        status: the status of the HTTP answer; 0: there was none.
        answer: the text of the answer; empty if there was none.
        retry_after_s: the seconds after which the API server wants the next request.
    """

    def __init__(
        self, status: int, message: str, answer: str = "", *, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer
        self.retry_after_s = retry_after_s


@final
@dataclass(frozen=True, slots=True)
class Patience:
    """The longest times of answers, in seconds.

    Attributes:
        request_s: the limit of every request except a watch.
        watch_s: the API server ends a watch after this time, and the operator begins the next one.
        margin_s: a watch that has not ended after this further time is on a dead connection.
    """

    request_s: float = 30.0
    watch_s: int = 120
    margin_s: float = 15.0


class Api:
    """The API server. Use it in `async with`.

    Attributes:
        namespace: the namespace that the configuration names.
    """

    def __init__(
        self,
        configuration: Any,
        patience: Patience,
        namespace: str = "default",
        manager: str = FIELD_MANAGER,
    ) -> None:
        """Nothing is connected yet.

        Args:
            configuration: the configuration of kubernetes_asyncio.
            patience: how long answers may take.
            namespace: the namespace, as above.
            manager: the name under which the API server remembers who set a field.
        """
        self._configuration = configuration
        self._patience = patience
        self._manager = manager
        self._client: Any = None
        self.namespace = namespace

    @classmethod
    async def from_environment(
        cls,
        patience: Patience = Patience(),
        *,
        kubeconfig: str = "",
        context: str = "",
        manager: str = FIELD_MANAGER,
    ) -> Api:
        """Return the API server of this pod, or else the one that the kubeconfig file names.

        Args:
            patience: how long answers may take.
            kubeconfig: a file, or several with `:` between them. Default: `KUBECONFIG`; without that, the
                pod's own account; outside of a pod, ~/.kube/config.
            context: the context in that file; default: its current one.
            manager: as above.

        Raises:
            ApiError: there is no such configuration.
        """
        configuration = client.Configuration()
        files = kubeconfig or os.environ.get("KUBECONFIG", "")
        namespace = ""
        try:
            if not files and not context and "KUBERNETES_SERVICE_HOST" in os.environ:
                load: Any = config.load_incluster_config  # this package has no types
                load(client_configuration=configuration)
                namespace = NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.exists() else ""
            else:
                loader = await config.load_kube_config(
                    config_file=_existing(files or "~/.kube/config"),
                    context=context or None,
                    client_configuration=configuration,
                )
                namespace = loader.current_context["context"].get("namespace", "")
        except (config.ConfigException, OSError, yaml.YAMLError, TypeError) as error:
            raise ApiError(
                0, f"there is no configuration of a Kubernetes cluster: {error}"
            ) from None
        return cls(configuration, patience, namespace or "default", manager)

    async def __aenter__(self) -> Api:
        self._client = client.ApiClient(self._configuration)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> JsonObject | None:
        """Return one object; None if it does not exist."""
        try:
            return await self._request("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def events(self, namespace: str, uid: str, reason: str) -> list[JsonObject]:
        """Return events about the object with this uid; none if the right to list them is missing."""
        query = {"limit": str(PAGE), "fieldSelector": f"regarding.uid={uid},reason={reason}"}
        try:
            answer = await self._request("GET", EVENT.path(namespace), query)
        except ApiError as error:
            if error.status == 403:
                return []
            raise
        return list(answer.get("items") or ())

    async def list(self, kind: Kind, namespace: str) -> tuple[list[JsonObject], str]:
        """Return all watched objects of a kind, and the version of the collection to watch from."""
        query = {"limit": str(PAGE)} | _selecting(kind)
        items: list[JsonObject] = []
        while True:
            answer = await self._request("GET", kind.path(namespace), query)
            for item in answer.get("items") or ():
                # The items of a list do not have their kind.
                items.append({"apiVersion": kind.api_version, "kind": kind.name} | item)
            more = answer["metadata"].get("continue")
            if not more:
                return items, str(answer["metadata"]["resourceVersion"])
            query["continue"] = more

    async def watch(self, kind: Kind, namespace: str, version: str) -> AsyncIterator[JsonObject]:
        """Yield events since a version of the collection, until the API server ends the watch.

        Raises:
            ApiError: with status 410 if that version is too old; the collection must be listed again.
        """
        query = _selecting(kind) | {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._patience.watch_s),
        }
        timeout = aiohttp.ClientTimeout(
            total=self._patience.watch_s + self._patience.margin_s,
            sock_connect=self._patience.request_s,
        )
        try:
            response = await self._send("GET", kind.path(namespace), query, timeout=timeout)
            async with response:
                async for line in _lines(response):
                    if not line.strip():
                        continue
                    event: JsonObject = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise ApiError(int(status.get("code", 500)), str(status.get("message", "")))
                    yield event
        except msgspec.DecodeError as error:
            raise ApiError(0, f"an event of a watch is not JSON: {error}") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _no_answer(error) from None

    async def create(self, made: Mapping[str, Any], kind: Kind) -> JsonObject:
        """Create an object. Raises ApiError with status 409 if it exists."""
        if kind.applied:
            metadata = {**made["metadata"], "resourceVersion": NEVER}
            return await self.apply({**made, "metadata": metadata}, kind)
        path = kind.path(made["metadata"]["namespace"])
        return await self._request("POST", path, {"fieldManager": self._manager}, body=made)

    async def update(self, changed: Mapping[str, Any], kind: Kind) -> JsonObject:
        """Replace an object of the version that it names. Raises ApiError with status 409 if it changed."""
        metadata = changed["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self._request("PUT", path, {"fieldManager": self._manager}, body=changed)

    async def apply(self, made: Mapping[str, Any], kind: Kind, *, manager: str = "") -> JsonObject:
        """Apply an object. With `metadata.resourceVersion` it fails with status 409 if it changed."""
        metadata = made["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": manager or self._manager, "force": "true"}
        return await self._request("PATCH", path, query, body=made, content_type=_APPLY)

    async def merge(
        self, kind: Kind, namespace: str, name: str, patch: JsonObject, *, subresource: str = ""
    ) -> JsonObject:
        """Send a merge patch. With `metadata.resourceVersion` it fails with status 409 if it changed."""
        query = {"fieldManager": self._manager}
        path = kind.path(namespace, name, subresource)
        return await self._request("PATCH", path, query, body=patch, content_type=_MERGE)

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, *, force: bool = False
    ) -> None:
        """Delete the object with this uid, with `force` at once and without its node.

        Raises:
            ApiError: with status 409 if another object has its name.
        """
        body: JsonObject = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        if force:
            body["gracePeriodSeconds"] = 0
        try:
            await self._request("DELETE", kind.path(namespace, name), body=body)
        except ApiError as error:
            if error.status != 404:
                raise

    async def log(self, namespace: str, pod: str, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Yield the lines of a container's log; with `follow` in the query until the container ends.

        Raises:
            ApiError: there is no such log, or the connection broke.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._patience.request_s)
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        try:
            async with await self._send("GET", path, query, timeout=timeout) as response:
                async for line in _lines(response):
                    yield line
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _no_answer(error) from None

    async def websocket(
        self, path: str, query: Mapping[str, str], protocol: str
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket to the API server, or through it to a node.

        Raises:
            ApiError: it is refused; an answer to that has no text.
        """
        headers: dict[str, str] = {}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        rest = self._client.rest_client
        options = {"server_hostname": rest.server_hostname} if rest.server_hostname else {}
        session: aiohttp.ClientSession = rest.pool_manager
        try:
            async with asyncio.timeout(self._patience.request_s):
                socket: aiohttp.ClientWebSocketResponse = await session.ws_connect(
                    f"{self._configuration.host}{path}?{urlencode(query)}",
                    headers=headers,
                    protocols=(protocol,),
                    proxy=rest.proxy,
                    proxy_headers=rest.proxy_headers,
                    max_msg_size=_LINE_BYTES_MAX,
                    **options,
                )
                return socket
        except aiohttp.WSServerHandshakeError as error:
            raise ApiError(error.status, f"GET {path}: status {error.status}") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _no_answer(error) from None

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Any = None,
        content_type: str = _JSON,
    ) -> JsonObject:
        timeout = aiohttp.ClientTimeout(total=self._patience.request_s)
        try:
            response = await self._send(
                method, path, query, body=body, content_type=content_type, timeout=timeout
            )
            async with response:
                answer: JsonObject = msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _no_answer(error) from None
        except msgspec.DecodeError as error:
            raise ApiError(0, f"the API server's answer is not JSON: {error}") from None
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        *,
        body: Any = None,
        content_type: str = _JSON,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Return the response, with its body not read yet. Raises ApiError for a refusal."""
        headers = {"Accept": _JSON, "Content-Type": content_type}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        url = self._configuration.host + path + (f"?{urlencode(query)}" if query else "")
        response: aiohttp.ClientResponse = await self._client.rest_client.request(
            method,
            url,
            headers=headers,
            body=body,
            _preload_content=False,
            _request_timeout=timeout,
        )
        if response.status >= 300:
            async with response:
                text = (await response.read()).decode(errors="replace")
            answer = _message(text)
            raise ApiError(
                response.status,
                f"{method} {path}: {answer}",
                answer,
                retry_after_s=_seconds(response.headers.get("Retry-After", "")),
            )
        return response


def _existing(files: str) -> str:
    """Return the existing kubeconfig files. Raises FileNotFoundError if there is none."""
    found = [file for file in files.split(os.pathsep) if Path(file).expanduser().is_file()]
    if not found:
        raise FileNotFoundError(f"there is no file {files}")
    return os.pathsep.join(found)


def _selecting(kind: Kind) -> dict[str, str]:
    return {"labelSelector": kind.selector} if kind.selector else {}


def _no_answer(error: BaseException) -> ApiError:
    return ApiError(0, f"the API server does not answer: {type(error).__name__} {error}".strip())


def _seconds(text: str) -> float:
    """Parse the header Retry-After, which the API server writes in whole seconds."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0


def _message(text: str) -> str:
    try:
        return str(msgspec.json.decode(text)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return " ".join(text[:500].split())


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield lines of any length up to a bound; aiohttp's own reader fails for long ones."""
    rest = bytearray()
    async for chunk in response.content.iter_any():
        rest += chunk
        *whole, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        if len(rest) > _LINE_BYTES_MAX:
            raise ApiError(0, f"a line of the answer has more than {_LINE_BYTES_MAX} bytes")
        for line in whole:
            yield line
