"""Certificates of one cluster, drawn when its front starts: an authority that signs the front's and each keeper's.

The authority's key never leaves the process, so nobody joins later. Needs the package ``cryptography`` (extra
[cluster]), which is imported when an authority is drawn.
"""

from __future__ import annotations

import datetime

from kvasir.cluster.wire import Identity
from kvasir.errors import ConfigError, install

# Life of the certificates: a front that serves for longer must be restarted.
DAYS = 3650


class Authority:
    """Draws a key and signs with it. Raises ConfigError without ``cryptography``."""

    def __init__(self) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as e:
            raise ConfigError(f"--cluster needs more packages. Install them: {install('cluster')}") from e
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign("kvasir", self._key.public_key(), authority=True)

    def identity(self, name: str) -> Identity:
        """A certificate for ``name`` with a key of its own."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        form = serialization.PrivateFormat.PKCS8
        pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        encoding = serialization.Encoding.PEM
        signed = self._sign(name, key.public_key(), authority=False)
        return Identity(signed.public_bytes(encoding), pem, self._certificate.public_bytes(encoding))

    def _sign(self, name: str, key, *, authority: bool):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        issuer = subject if authority else self._certificate.subject
        signer = self._key.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))  # hosts' clocks differ
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        )
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=authority,
            crl_sign=authority,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(usage, critical=True)
        if not authority:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        return builder.sign(self._key, hashes.SHA256())
