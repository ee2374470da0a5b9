"""The handlers of the custom calls, made known to XLA."""

from __future__ import annotations

import re
from pathlib import Path

import jax

from pagecore.interop.jax import _xla


def register() -> None:
    """Register the handlers for the host; refused where this JAX could not serve them.

    XLA looks at a handler's version when it first needs a device, and with one that it does not know has no devices at
    all. So the versions are compared before.
    """
    here = _version_of(Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h")
    wanted = _xla.api_version()
    if here is not None and (here[0] != wanted[0] or here[1] < wanted[1]):
        raise ImportError(
            f"pagecore.interop.jax speaks version {wanted[0]}.{wanted[1]} of XLA's foreign function interface, and jax "
            f"{jax.__version__} speaks {here[0]}.{here[1]}; it needs jax>=0.10: pip install 'pagecore[jax]'",
            name="jax",
        )
    for target, handler in _xla.handlers().items():
        jax.ffi.register_ffi_target(target, handler, platform="cpu")


def _version_of(header: Path) -> tuple[int, int] | None:
    """What JAX's own header says; None where it was installed without, and XLA itself will say."""
    try:
        text = header.read_text()
    except OSError:
        return None
    found = [re.search(rf"^#define XLA_FFI_API_{part} (\d+)$", text, re.MULTILINE) for part in ("MAJOR", "MINOR")]
    numbers = [int(match[1]) for match in found if match]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None
