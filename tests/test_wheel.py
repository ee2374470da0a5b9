"""The wheel: its contents, without generated files, and its use away from the source tree."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy
import pytest

from tests.capabilities import require

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
# The call of pip, which would run setup.py three times. Compression takes half of the time.
BUILD = """
import sys
from setuptools import build_meta
build_meta.build_wheel(sys.argv[1], {"--build-option": "--compression=stored"})
"""
TRY = """
import numpy as np, pagecore
assert "site-packages" in pagecore.__file__, pagecore.__file__
from pagecore.ops.cuda.compilation.manifest import instances
from pagecore.ops.cuda.compilation.sources import source_folder, with_headers
assert source_folder().parent.name == "pagecore", source_folder()
for source in {each.source for each in instances()}:
    assert "cuda_src/abi/types.h" in with_headers(source)[1], source
cache = pagecore.PagedKVCache(pagecore.AttentionSpec(2, 8, dtype="float32"), num_blocks=4)
with cache.add_sequence([1, 2, 3]) as sequence:
    batch = cache.prepare([sequence], 3)
    x = np.ones((3, 2, 8), np.float32)
    cache.write(0, x, x, batch)
    assert np.allclose(cache.attend(0, x, batch), 1.0)
"""
TRY_JAX = """
import numpy as np, jax
from pagecore.interop import jax as interop
assert "site-packages" in interop.__file__, interop.__file__
cache = jax.numpy.zeros((4, 4, 2, 8))
x = np.ones((1, 2, 8), np.float32)
keys, values = jax.jit(interop.write_kv, donate_argnums=(2, 3))(x, x, cache, cache + 0, np.array([4]))
assert np.allclose(interop.paged_attention(x, keys, values, [[1]], [1]), 1.0)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("Cython", reason="needs cython: it is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=ROOT, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_holds_sources_for_cuda_and_cimport_and_nothing_generated(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    sources = [path for path in (ROOT / "cuda_src").rglob("*") if path.suffix in {".cu", ".cuh", ".h", ".toml"}]
    assert {f"pagecore/{path.relative_to(ROOT).as_posix()}" for path in sources} <= set(names)
    for room in ("arrays", "index", "ops", "cache"):
        assert any(name.startswith(f"pagecore/{room}/") and name.endswith(".pxd") for name in names)
        assert any(name.startswith(f"pagecore/{room}/") and name.endswith(".so") for name in names)
    assert "pagecore/py.typed" in names
    assert not [name for name in names if name.endswith((".cpp", ".c", ".pyx", ".o", ".a"))]
    assert not [name for name in names if name.startswith(("tests/", "bench/", "build/"))]


def run_with(wheel, packages, code, folder):
    """Run code in a new environment that has only the wheel and the given packages of this one."""
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    site = next((folder / "env" / "lib").glob("python*")) / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for package in Path(numpy.__file__).parent.parent.iterdir():
        if package.name.split("-")[0].split(".")[0] in packages:
            (site / package.name).symlink_to(package)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    subprocess.run([python, "-c", code], cwd=folder, env=environment, check=True)


@pytest.mark.slow
def test_a_wheel_works_in_a_new_environment(wheel, tmp_path):
    run_with(wheel, {"numpy", "ml_dtypes"}, TRY, tmp_path)


@pytest.mark.slow
def test_a_wheel_works_with_a_jax_that_is_installed_later(wheel, tmp_path):
    """Building a wheel needs no headers of JAX."""
    require("jax")
    run_with(wheel, {"numpy", "ml_dtypes", "jax", "jaxlib", "opt_einsum", "scipy"}, TRY_JAX, tmp_path)
