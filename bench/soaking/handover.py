"""Hand-overs of the soak: a sequence goes from one engine to another, and every byte that arrives is compared."""

from __future__ import annotations

import random
from collections.abc import Hashable

from bench.soaking.engine import Engine, Tokens
from pagecore.errors import OutOfBlocks
from pagecore.tiers.handover.errors import HandoverError
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import start_import
from pagecore.tiers.handover.transports.sockets import SocketTransport

__all__ = ["hand_over"]

SECONDS = 20.0


def hand_over(
    transport: SocketTransport,
    sender: Engine,
    receiver: Engine,
    tokens: Tokens,
    namespace: Hashable,
    draw: random.Random,
) -> str:
    """Compute a prompt in one engine and import it in another; return what was done to the hand-over.

    Raises
    ------
    RuntimeError
        Rows were not given back.
    """
    with sender.computed(tokens, namespace) as sequence:
        manifest = export_sequence(sender.cache, sequence, transport=transport, lease=SECONDS)
    fault = draw.choice(("hand-over", "hand-over", "cancelled hand-over", "withdrawn hand-over"))
    try:
        running = start_import(
            receiver.cache, manifest.encode(), transport=transport, namespace=namespace, deadline=SECONDS
        )
        if fault == "cancelled hand-over":
            running.cancel()
        elif fault == "withdrawn hand-over":
            transport.withdraw(manifest.export)
        with running.result() as arrived:
            receiver.compare(arrived, tokens, namespace)
    except HandoverError:
        if fault == "hand-over":
            raise
    except OutOfBlocks:
        if sender is not receiver:  # the export holds blocks of the same pools
            raise
        fault = "refused hand-over"
    transport.withdraw(manifest.export)
    if not transport.drain(SECONDS):
        raise RuntimeError(f"{transport!r} has not given back the rows of a hand-over")
    return fault
