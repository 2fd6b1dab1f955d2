"""The TLS of clients: authorities to trust, and the client's own certificate, from files."""

from __future__ import annotations

import ssl

from ..errors import UsageError


def client_context(ca: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext:
    """Return the context of a client's connections.

    Args:
        ca: the file of the authorities to trust; None: those of the system.
        certificate: the file with the certificate of the client; None: it has none.
        key: the file with its key.

    Raises:
        UsageError: a file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        raise UsageError(
            f"the files of certificates cannot be read: {error}",
            fix="they must be there on all machines of the cluster",
        ) from None
    return context
