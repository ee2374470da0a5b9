"""Registration of the handlers of the custom calls with XLA."""

from __future__ import annotations

import re
from pathlib import Path

import jax

from pagecore.interop.jax import _xla


def register() -> None:
    """Register the handlers for the host.

    XLA checks the version of a handler when it first uses a device, and an unknown version leaves the process without
    devices. So the versions are compared here first.

    Raises
    ------
    ImportError
        This version of JAX does not support the handlers.
    """
    here = _version_of(Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h")
    wanted = _xla.api_version()
    if here is not None and (here[0] != wanted[0] or here[1] < wanted[1]):
        raise ImportError(
            f"pagecore.interop.jax needs version {wanted[0]}.{wanted[1]} of XLA's foreign function interface, but jax "
            f"{jax.__version__} has {here[0]}.{here[1]}; install jax>=0.10: pip install 'pagecore[jax]'",
            name="jax",
        )
    for target, handler in _xla.handlers().items():
        jax.ffi.register_ffi_target(target, handler, platform="cpu")


def _version_of(header: Path) -> tuple[int, int] | None:
    """Return the version in JAX's header, or None if JAX was installed without headers; then XLA checks it."""
    try:
        text = header.read_text()
    except OSError:
        return None
    found = [re.search(rf"^#define XLA_FFI_API_{part} (\d+)$", text, re.MULTILINE) for part in ("MAJOR", "MINOR")]
    numbers = [int(match[1]) for match in found if match]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None
