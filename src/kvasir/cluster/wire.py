"""Messages of front and keeper besides those of the engine, and the certificates by which they know each other.

The frames are those of ``client/ipc.py``, over TCP with mutual TLS; nothing is ever unpickled.
"""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass

import msgspec

from kvasir.client import ipc, messages
from kvasir.client.ipc import Activity

# Names in the certificates: a keeper must not pass for the front, nor the front for a keeper.
FRONT, KEEPER = "front.kvasir", "keeper.kvasir"


class Beat(msgspec.Struct, tag=True):
    """The flight record of the engine process on the keeper's host; see ``ipc.Flight``."""

    progress: int
    steps: int
    activity: Activity
    slow: bool


class Ended(msgspec.Struct, tag=True, kw_only=True):
    """The end of the engine process; the keeper closes the connection. ``at_work``, ``launches`` and ``ended``: see
    ``child.Child``."""

    obituary: str
    from_outside: bool
    at_work: list[int] | None
    launches: list[ipc.FlightStep]
    ended: float


class Kill(msgspec.Struct, tag=True):
    """End the engine process at once."""


class DumpStacks(msgspec.Struct, tag=True):
    """Make the engine process write its stacks to the keeper's stderr."""


class Tag(msgspec.Struct):
    """The name of a message; the rest is not looked at."""

    type: str


FromKeeper = messages.ToClient | Beat | Ended
ToKeeper = messages.Hello | Kill | DumpStacks

_TAGS = msgspec.msgpack.Decoder(Tag)


def tag(body: bytes) -> str:
    """The name of the message in ``body``; "" when it is not a message."""
    try:
        return _TAGS.decode(body).type
    except msgspec.MsgspecError:
        return ""


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate with its private key, and that of the authority which signed all of a cluster's; PEM."""

    certificate: bytes
    key: bytes
    authority: bytes

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3 that shows this certificate, and trusts those that the authority has signed."""
        purpose = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode())
        with tempfile.NamedTemporaryFile(prefix="kvasir-") as file:  # mode 0600; ssl reads keys from files only
            file.write(self.certificate + self.key)
            file.flush()
            context.load_cert_chain(file.name)
        return context


def peer_is(peer: dict | None, name: str) -> bool:
    """Whether a verified certificate (``SSLSocket.getpeercert``) names ``name``."""
    return ("DNS", name) in (peer or {}).get("subjectAltName", ())
