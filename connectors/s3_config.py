"""The settings of all clients of S3, those that read or write files and those that keep checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import OptionError
from ..operators.durations import parse_duration

S3_ENDPOINT: Final = "s3.endpoint"
S3_REGION: Final = "s3.region"
S3_PATH_STYLE: Final = "s3.path-style-access"
S3_CONNECTIONS: Final = "s3.connection.maximum"
S3_CONNECT_TIMEOUT: Final = "s3.connection.establish.timeout"
S3_TIMEOUT: Final = "s3.connection.timeout"
S3_ATTEMPTS: Final = "s3.attempts.maximum"
S3_UPLOAD_PARTS: Final = "s3.fast.upload.active.blocks"
S3_ENTROPY_KEY: Final = "s3.entropy.key"
S3_ENTROPY_LENGTH: Final = "s3.entropy.length"
S3_ENCRYPTION: Final = "s3.sse.type"
S3_ENCRYPTION_KEY: Final = "s3.sse.kms.key-id"
S3_ROLE: Final = "s3.assume-role.arn"
S3_ROLE_EXTERNAL_ID: Final = "s3.assume-role.external-id"
S3_ROLE_SESSION: Final = "s3.assume-role.session-name"
S3_OPTIONS: Final = (
    S3_ENDPOINT,
    S3_REGION,
    S3_PATH_STYLE,
    S3_CONNECTIONS,
    S3_CONNECT_TIMEOUT,
    S3_TIMEOUT,
    S3_ATTEMPTS,
    S3_UPLOAD_PARTS,
    S3_ENTROPY_KEY,
    S3_ENTROPY_LENGTH,
    S3_ENCRYPTION,
    S3_ENCRYPTION_KEY,
    S3_ROLE,
    S3_ROLE_EXTERNAL_ID,
    S3_ROLE_SESSION,
)
"""All options that say how S3 is reached; `runtime/options/state.py` explains them."""
CONNECTIONS_MAX: Final = 32
CONNECT_TIMEOUT_MS: Final = 10_000
TIMEOUT_MS: Final = 30_000
ATTEMPTS_MAX: Final = 8
UPLOAD_PARTS_MAX: Final = 4
ENTROPY_LENGTH: Final = 4
ROLE_SESSION: Final = "headgate"
_ALGORITHMS: Final = {"none": "", "sse-s3": "AES256", "sse-kms": "aws:kms"}
"""The values of `s3.sse.type`, and what S3 calls them, which is understood as well."""


@dataclass(frozen=True, slots=True)
class S3Role:
    """A role that is assumed with the credentials of the environment."""

    arn: str
    session: str
    external_id: str = ""

    def arguments(self) -> dict[str, str]:
        """Return further arguments of the request for the credentials of the role."""
        found = {"RoleSessionName": self.session}
        if self.external_id:
            found["ExternalId"] = self.external_id
        return found


@dataclass(frozen=True, slots=True)
class S3Service:
    """The S3 service, from a job's options or else from the usual AWS variables. Empty values mean that
    of AWS.
    """

    endpoint: str
    region: str
    path_style: bool
    """True if the bucket goes into the path instead of the host name."""
    connections_max: int = CONNECTIONS_MAX
    """The number of connections that one client keeps open."""
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS
    timeout_ms: int = TIMEOUT_MS
    """The time for which an open connection may be silent while an answer is due."""
    attempts_max: int = ATTEMPTS_MAX
    """The number of times that a request is made before its last error counts, including the first time."""
    upload_parts_max: int = UPLOAD_PARTS_MAX
    """The number of parts of one file that are uploaded at once, or wait for their upload."""
    entropy_key: str = ""
    """The text in the address of checkpoints that is replaced in the keys of their files."""
    entropy_length: int = ENTROPY_LENGTH
    algorithm: str = ""
    """How the server encrypts what is written: `AES256`, `aws:kms`; empty: as the bucket says."""
    encryption_key: str = ""
    """The key of `aws:kms`; empty: that of the account."""
    role: S3Role | None = None

    def encryption(self) -> dict[str, str]:
        """Return the arguments of requests that create an object or an upload."""
        if not self.algorithm:
            return {}
        found = {"ServerSideEncryption": self.algorithm}
        if self.encryption_key:
            found["SSEKMSKeyId"] = self.encryption_key
        return found


def s3_service(options: Mapping[str, str]) -> S3Service:
    """Return the service that the options and the environment name.

    Raises:
        OptionError: the value of an option is wrong.
    """
    environment = os.environ
    endpoint = (
        options.get(S3_ENDPOINT)
        or environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or ""
    )
    region = (
        options.get(S3_REGION)
        or environment.get("AWS_REGION")
        or environment.get("AWS_DEFAULT_REGION")
        or ""
    )
    # Services other than AWS rarely have a host name per bucket.
    path_style = options.get(S3_PATH_STYLE, "true" if endpoint else "false").strip().lower()
    if path_style not in ("true", "false"):
        raise OptionError(
            f"not a boolean key=`{S3_PATH_STYLE}` value=`{path_style}`", fix="write true or false"
        )
    return S3Service(
        endpoint,
        region,
        path_style == "true",
        _count(options, S3_CONNECTIONS, CONNECTIONS_MAX),
        _milliseconds(options, S3_CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS),
        _milliseconds(options, S3_TIMEOUT, TIMEOUT_MS),
        _count(options, S3_ATTEMPTS, ATTEMPTS_MAX),
        _count(options, S3_UPLOAD_PARTS, UPLOAD_PARTS_MAX),
        options.get(S3_ENTROPY_KEY, ""),
        _count(options, S3_ENTROPY_LENGTH, ENTROPY_LENGTH),
        *_encryption(options),
        _role(options),
    )


def _encryption(options: Mapping[str, str]) -> tuple[str, str]:
    """Return the algorithm and the key of the encryption that is asked for."""
    kind = options.get(S3_ENCRYPTION, "none").strip().lower()
    kind = next((each for each, name in _ALGORITHMS.items() if name.lower() == kind), kind)
    if kind not in _ALGORITHMS:
        raise OptionError(
            f"no such encryption key=`{S3_ENCRYPTION}` value=`{kind}`",
            fix=f"one of: {', '.join(_ALGORITHMS)}",
        )
    key = options.get(S3_ENCRYPTION_KEY, "")
    if key and kind != "sse-kms":
        raise OptionError(
            f"only sse-kms has a key key=`{S3_ENCRYPTION_KEY}` value=`{key}`",
            fix=f"{S3_ENCRYPTION}: sse-kms",
        )
    return _ALGORITHMS[kind], key


def _role(options: Mapping[str, str]) -> S3Role | None:
    arn, external_id = options.get(S3_ROLE, ""), options.get(S3_ROLE_EXTERNAL_ID, "")
    if not arn:
        if external_id:
            raise OptionError(
                f"only a role has an external id key=`{S3_ROLE_EXTERNAL_ID}`",
                fix=f"name the role: {S3_ROLE}",
            )
        return None
    return S3Role(arn, options.get(S3_ROLE_SESSION, ROLE_SESSION), external_id)


def without_role(options: Mapping[str, str], what: str) -> S3Service:
    """Return the service for a library that cannot assume a role.

    Raises:
        OptionError: there is one, or the value of an option is wrong.
    """
    service = s3_service(options)
    if service.role is not None:
        raise OptionError(
            f"{what} do not assume roles key=`{S3_ROLE}` value=`{service.role.arn}`",
            fix="give the environment the credentials of the role, and this connector "
            f'storage_options={{"{S3_ROLE}": ""}}',
        )
    return service


def _count(options: Mapping[str, str], key: str, default: int) -> int:
    text = options.get(key, str(default))
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise OptionError(f"not a whole number key=`{key}` value=`{text}`", fix="write 1 or more")


def _milliseconds(options: Mapping[str, str], key: str, default: int) -> int:
    if key not in options:
        return default
    milliseconds = parse_duration(options[key], key)
    if not milliseconds:
        raise OptionError(f"a time-out must not be 0 key=`{key}`", fix="write a time such as 10 s")
    return milliseconds


def compatibility(service: S3Service) -> dict[str, Any]:
    """Return arguments for botocore's `Config` by which it can talk to stores other than AWS."""
    config: dict[str, Any] = {}
    if service.path_style:
        config["s3"] = {"addressing_style": "path"}
    if service.endpoint:
        # Many S3-compatible stores do not know the checksum trailers that botocore now sends to AWS.
        config["request_checksum_calculation"] = "when_required"
        config["response_checksum_validation"] = "when_required"
    return config
