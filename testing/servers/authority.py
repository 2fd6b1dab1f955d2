"""An authority of tests, whose certificates servers and clients of TLS can use. It needs `cryptography`."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any


class Authority:
    """Signs certificates that are valid for a day.

    Attributes:
        file: its own certificate, which clients trust.
    """

    def __init__(self, directory: Path) -> None:
        """Make an authority whose files are in this directory, which is created."""
        from cryptography.hazmat.primitives.asymmetric import ec

        directory.mkdir()
        self.file = directory / "ca.pem"
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file.write_bytes(self._signed("headgate tests", self._key.public_key(), ca=True))

    def issue(self, name: str) -> tuple[Path, Path]:
        """Return the files of a new certificate for a name or an address, and of its key."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._directory / f"{name}.pem"
        certificate.write_bytes(self._signed(name, key.public_key(), ca=False))
        key_file = self._directory / f"{name}.key"
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate, key_file

    def server_context(self, name: str = "127.0.0.1") -> ssl.SSLContext:
        """Return what a server with this name or address needs for TLS."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue(name))
        return context

    def _signed(self, name: str, key: Any, *, ca: bool) -> bytes:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.x509.oid import NameOID

        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named("headgate tests"))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if not ca:
            try:
                other: x509.GeneralName = x509.IPAddress(ip_address(name))
            except ValueError:
                other = x509.DNSName(name)
            made = made.add_extension(x509.SubjectAlternativeName([other]), critical=False)
        signed = made.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)
