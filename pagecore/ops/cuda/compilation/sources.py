"""The sources of the kernels, in an installed package or in a source tree."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from pagecore.errors import DeviceError

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"cuda_src/([^"]+)"', re.MULTILINE)


@cache
def source_folder() -> Path:
    """Return the folder of cuda_src: inside of an installed package, or next to it in a source tree.

    Raises
    ------
    DeviceError
        The folder is missing.
    """
    package = Path(__file__).parents[3]
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if (folder / "manifest.toml").is_file():
            return folder
    raise DeviceError(f"the CUDA sources are neither in {package} nor next to it: install pagecore again")


def read_source(name: str) -> str:
    """Return the text of a source or header by its path in cuda_src."""
    return (source_folder() / name).read_text(encoding="utf-8")


def with_headers(name: str) -> tuple[str, dict[str, str]]:
    """Return a source and all headers that it includes, directly or not, by the names that includes give them.

    These names begin with ``cuda_src/``. Another name is that of the emulator's half of primitives.cuh, which the
    preprocessor of a device does not include.
    """
    text = read_source(name)
    headers: dict[str, str] = {}
    waiting = _INCLUDE.findall(text)
    while waiting:
        path = waiting.pop()
        header = f"cuda_src/{path}"
        if header not in headers:
            headers[header] = read_source(path)
            waiting += _INCLUDE.findall(headers[header])
    return text, headers
