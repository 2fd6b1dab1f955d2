"""What every client of S3 is told, whether it reads, writes or keeps checkpoints."""

from __future__ import annotations

from typing import Any


def compatibility(endpoint: str | None, path_style: bool) -> dict[str, Any]:
    """Arguments for botocore's `Config` that make it speak to stores other than AWS.

    Args:
        endpoint: address of the store; None or empty: AWS.
        path_style: the bucket goes into the path instead of the host name.
    """
    config: dict[str, Any] = {}
    if path_style:
        config["s3"] = {"addressing_style": "path"}
    if endpoint:
        # Many S3-compatible stores do not know the checksum trailers that botocore now sends to AWS.
        config["request_checksum_calculation"] = "when_required"
        config["response_checksum_validation"] = "when_required"
    return config
