"""Other systems' index structures, from their own published packages, timed beside ours on the host.

Nothing of theirs is kept here: `PAGECORE_PEERS` names the folder outside the repository that holds the packages.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HOME = Path(os.environ.get("PAGECORE_PEERS", "~/.cache/pagecore-peers")).expanduser()


class PeerMissing(Exception):
    """A peer is not installed; the message is the recipe."""


def add_to_path(peer: str, folder: str, recipe: str) -> None:
    """Make the peer's unpacked package importable.

    Raises
    ------
    PeerMissing
        It is not there.
    """
    place = HOME / folder
    if not place.is_dir():
        raise PeerMissing(f"{peer} is not in {place}. To have it there (PAGECORE_PEERS names another place):\n{recipe}")
    sys.path.insert(0, str(place))


def unimportable(peer: str, folder: str, error: ImportError, recipe: str) -> PeerMissing:
    """The package is there, and something that it needs is not."""
    return PeerMissing(f"{peer} in {HOME / folder} cannot be imported: {error}. What it needs:\n{recipe}")
