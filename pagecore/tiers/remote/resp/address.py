"""Address of a Redis or Valkey server, as a URL names it."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from pagecore.errors import UnsupportedOption

FORMS = "redis://[user:password@]host[:port][/database], rediss://... for TLS, or unix:///path/to/socket[?db=database]"
PORT = 6379
SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True, "unix": False}


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server. `path` is that of a Unix socket, or None for TCP; `name` has no password."""

    host: str = "localhost"
    port: int = PORT
    path: str | None = None
    database: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    has_tls: bool = False

    @property
    def name(self) -> str:
        """The URL without user and password."""
        if self.path is not None:
            return f"unix://{self.path}?db={self.database}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.has_tls else 'redis'}://{host}:{self.port}/{self.database}"

    @classmethod
    def parse(cls, url: str) -> Address:
        """Return the address that a URL names.

        Raises
        ------
        UnsupportedOption
            The URL has another form.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
            query = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
            url.encode()
            (parts.hostname or "").encode("idna")  # as the resolver will
        except (ValueError, TypeError, AttributeError) as error:
            raise UnsupportedOption(f"the URL does not parse ({error}); use {FORMS}") from None
        if parts.scheme not in SCHEMES or parts.fragment:
            raise UnsupportedOption(f"expected a URL of Redis or Valkey, got the scheme {parts.scheme!r}; use {FORMS}")
        is_unix = parts.scheme == "unix"
        if query.keys() - {"db"} or (is_unix and (not parts.path or parts.hostname)):
            raise UnsupportedOption(f"the URL has an unknown option or an incomplete path; use {FORMS}")
        database = query.get("db", "0" if is_unix else parts.path.strip("/") or "0")
        if not database.isdecimal():
            raise UnsupportedOption(f"expected the number of a database in the URL, got {database!r}; use {FORMS}")
        return cls(
            host=parts.hostname or "localhost",
            port=PORT if port is None else port,
            path=unquote(parts.path) if is_unix else None,
            database=int(database),
            user=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            has_tls=SCHEMES[parts.scheme],
        )
