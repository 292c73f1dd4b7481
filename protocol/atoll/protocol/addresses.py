"""Where something listens: ``HOST:PORT``, read and written in one way."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.errors import JobError


@dataclass(frozen=True, slots=True)
class Address:
    """Where something listens. ``str()`` gives ``HOST:PORT``, with brackets around an IPv6 address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def is_unspecified(self) -> bool:
        """Whether it stands for all of the machine's addresses, and so cannot be dialled."""
        return self.host in ("0.0.0.0", "::", "")


def parse_address(text: str, field: str = "address") -> Address:
    """``HOST:PORT``, ``[IPV6]:PORT``; raises JobError that names ``field`` (the flag the text came from)."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise JobError(field, f"{text!r} is not HOST:PORT, for example 127.0.0.1:7000 or [::1]:7000")
    if ":" in host and not bracketed:
        raise JobError(field, f"{text!r}: write an IPv6 address in brackets, for example [::1]:7000")
    return Address(host=host[1:-1] if bracketed else host, port=int(port))
