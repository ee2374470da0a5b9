"""The other process of a hand-over: ``python -m tests.tiers.handover.child export|import KIND FOLDER``.

An exporter prints its manifest in hexadecimal and waits. An importer reads one, and prints "arrived" or an error.
"""

from __future__ import annotations

import sys

from pagecore.errors import PagecoreError
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence
from tests.tiers.handover.conftest import pair_of
from tests.tiers.handover.pairs import assert_same, computed, content, fill, make

TOKENS = list(range(100, 400))


def prepared():
    """A cache with a sequence of known bytes."""
    cache = make(num_blocks=100)
    fill(cache, 1)
    return cache, computed(cache, TOKENS)


def main(role, kind, folder):
    if kind == "nixl":
        # nixl would import torch to find the version of CUDA. That takes seconds, in which agents of the parent poll.
        sys.modules["torch"] = None
    with pair_of(kind, folder) as (exporter, importer):
        cache, sequence = prepared()
        if role == "export":
            manifest = export_sequence(cache, sequence, transport=exporter, lease=60, readers=2)
            print("MANIFEST", manifest.encode().hex(), flush=True)
            sys.stdin.readline()
            return
        receiver = make(num_blocks=100)
        print("READY", flush=True)
        manifest = bytes.fromhex(sys.stdin.readline())
        try:
            arrived = import_sequence(receiver, manifest, transport=importer)
            assert_same(content(cache, sequence), content(receiver, arrived))
            print("arrived", flush=True)
        except PagecoreError as error:
            print(type(error).__name__, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
