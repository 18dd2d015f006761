"""A self-signed certificate for one job, with its private key."""

from __future__ import annotations

import datetime


def new(now: datetime.datetime | None = None) -> tuple[bytes, bytes]:
    """Private key and certificate as PEM, and the certificate alone as DER. It uses an elliptic curve, P-256.
    `now`: what this host's clock says, if not the time."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dmltrain-launch")])
    now, day = now or datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + 3650 * day)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem, der = serialization.Encoding.PEM, serialization.Encoding.DER
    return secret + signed.public_bytes(pem), signed.public_bytes(der)
