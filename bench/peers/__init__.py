"""Index structures of other systems, from their published packages, timed against pagecore on the host.

No peer code is kept here: `PAGECORE_PEERS` names the folder outside the repository that holds the packages.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HOME = Path(os.environ.get("PAGECORE_PEERS", "~/.cache/pagecore-peers")).expanduser()


class PeerMissing(Exception):
    """A missing peer; the message is the recipe to install it."""


def add_to_path(peer: str, folder: str, recipe: str) -> None:
    """Make the peer's unpacked package importable, also by processes that it starts.

    Raises
    ------
    PeerMissing
        The package is not installed.
    """
    place = HOME / folder
    if not place.is_dir():
        raise PeerMissing(f"{peer} is not in {place}. To install it (PAGECORE_PEERS names another folder):\n{recipe}")
    sys.path.insert(0, str(place))
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def unimportable(peer: str, folder: str, error: ImportError, recipe: str) -> PeerMissing:
    """Return the error for a package with missing dependencies."""
    return PeerMissing(f"{peer} in {HOME / folder} cannot be imported: {error}. To install its dependencies:\n{recipe}")
