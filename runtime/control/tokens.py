"""The token of a job: random, or the content of a file that every side has."""

from __future__ import annotations

import secrets
from pathlib import Path

from ...errors import UsageError
from ..options.network import CONTROL_TOKEN_FILE
from ..options.registry import Options

TOKEN_CHARACTERS_MIN = 16


def make_token(options: Options) -> str:
    """The token for a job that begins: that of its file, or a random one.

    Raises:
        UsageError: the file has none.
    """
    path = options.get(CONTROL_TOKEN_FILE)
    return secrets.token_hex(16) if path is None else read_token_file(Path(path))


def read_token_file(path: Path) -> str:
    """The token in a file, without white space around it.

    Raises:
        UsageError: the file cannot be read, or what is in it is too short for a secret.
    """
    try:
        token = path.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the token file cannot be read path=`{path}`: {error}",
            fix="mount the secret there, or name another file",
        ) from None
    if len(token) < TOKEN_CHARACTERS_MIN:
        raise UsageError(
            f"the token in the file is too short path=`{path}` characters=`{len(token)}`",
            fix=f"put at least {TOKEN_CHARACTERS_MIN} random characters there, such as the output of "
            "`openssl rand -hex 16`",
        )
    return token
