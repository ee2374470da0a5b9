"""Registration of the handlers, and errors for missing or incompatible versions of JAX."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_installed_jax_supports_the_compiled_version(jax):
    from pagecore.interop.jax import _xla

    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)[1]) for part in ("MAJOR", "MINOR"))
    assert _xla.api_version() == (0, 3)
    assert (major, minor) >= (0, 3)
    assert major == 0


@pytest.mark.parametrize("version", ["0 2", "1 3"])
def test_an_incompatible_jax_raises_before_anything_is_registered(jax, interop, monkeypatch, tmp_path, version):
    from pagecore.interop.jax import registration

    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    major, minor = version.split()
    header.write_text(f"#define XLA_FFI_API_MAJOR {major}\n#define XLA_FFI_API_MINOR {minor}\n")
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", None)
    with pytest.raises(
        ImportError, match=rf"needs version 0\.3 .* has {major}\.{minor}; install jax>=0\.10: pip install"
    ):
        registration.register()


def test_a_jax_without_headers_is_checked_by_xla(jax, interop, monkeypatch, tmp_path):
    from pagecore.interop.jax import registration

    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    registered = {}
    monkeypatch.setattr(
        jax.ffi, "register_ffi_target", lambda name, capsule, platform: registered.update({name: platform})
    )
    registration.register()
    targets = ("paged_attention", "write_kv", "seal_kv", "unseal_kv", "addresses")
    assert registered == {f"pagecore_{target}": "cpu" for target in targets}


def test_without_jax_the_import_error_names_the_package_to_install():
    code = """
import sys
sys.modules["jax"] = None
import pagecore.interop.jax._xla
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert re.search(r"ImportError: pagecore\.interop\.jax needs JAX .*: pip install 'pagecore\[jax\]'", ran.stderr)
