"""What every client of S3 is told, whether it reads, writes or keeps checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import OptionError

S3_ENDPOINT: Final = "s3.endpoint"
S3_REGION: Final = "s3.region"
S3_PATH_STYLE: Final = "s3.path-style-access"


@dataclass(frozen=True, slots=True)
class S3Service:
    """Which service, from a job's options or else from the usual AWS variables; empty: that of AWS."""

    endpoint: str
    region: str
    path_style: bool
    """The bucket goes into the path instead of the host name."""


def s3_service(options: Mapping[str, str]) -> S3Service:
    """The service that the options and the environment name.

    Raises:
        OptionError: `s3.path-style-access` is neither true nor false.
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
    return S3Service(endpoint, region, path_style == "true")


def compatibility(service: S3Service) -> dict[str, Any]:
    """Arguments for botocore's `Config` that make it speak to stores other than AWS."""
    config: dict[str, Any] = {}
    if service.path_style:
        config["s3"] = {"addressing_style": "path"}
    if service.endpoint:
        # Many S3-compatible stores do not know the checksum trailers that botocore now sends to AWS.
        config["request_checksum_calculation"] = "when_required"
        config["response_checksum_validation"] = "when_required"
    return config
