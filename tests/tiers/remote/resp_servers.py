"""Commands to a server of the tests, and waits for what it does."""

import time

from pagecore.tiers.remote.resp.address import Address
from pagecore.tiers.remote.resp.connection import RespConnection, encode


def command(url, *arguments):
    """Send one command on a connection of its own; return the bulk string or line of the answer."""
    connection = RespConnection(Address.parse(url), timeout=5.0)
    connection.open()
    try:
        connection.send([encode(*arguments)])
        line = connection.line()
        if line[:1] != b"$" or line == b"$-1":
            return line
        value = bytearray(int(line[1:]))
        connection.into(memoryview(value))
        connection.end_bulk()
        return bytes(value)
    finally:
        connection.close()


def until(condition):
    """Poll until a condition holds."""
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit, "too late"
        time.sleep(0.005)
