"""A wheel holds what it must, nothing generated, and works away from the source tree."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).parent.parent
TRY = """
import numpy as np, pagecore
assert "site-packages" in pagecore.__file__, pagecore.__file__
from pagecore.ops.cuda.manifest import instances
from pagecore.ops.cuda.sources import source_folder, with_headers
assert source_folder().parent.name == "pagecore", source_folder()
for source in {each.source for each in instances()}:
    assert "abi.h" in with_headers(source)[1], source
cache = pagecore.PagedKVCache(pagecore.AttentionSpec(2, 8, dtype="float32"), num_blocks=4)
with cache.add_sequence([1, 2, 3]) as sequence:
    batch = cache.prepare([sequence], 3)
    x = np.ones((3, 2, 8), np.float32)
    cache.write(0, x, x, batch)
    assert np.allclose(cache.attend(0, x, batch), 1.0)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("Cython", reason="cython is missing")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, "."]
    subprocess.run(command, cwd=ROOT, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_holds_sources_for_cuda_and_cimport_and_nothing_generated(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    sources = [path for path in (ROOT / "cuda_src").iterdir() if path.suffix in {".cu", ".cuh", ".h", ".toml"}]
    assert {f"pagecore/cuda_src/{path.name}" for path in sources} <= set(names)
    for room in ("arrays", "index", "ops", "cache"):
        assert any(name.startswith(f"pagecore/{room}/") and name.endswith(".pxd") for name in names)
        assert any(name.startswith(f"pagecore/{room}/") and name.endswith(".so") for name in names)
    assert "pagecore/py.typed" in names
    assert not [name for name in names if name.endswith((".cpp", ".c", ".pyx", ".o", ".a"))]
    assert not [name for name in names if name.startswith(("tests/", "bench/", "build/"))]


@pytest.mark.slow
def test_a_wheel_works_in_an_environment_of_its_own(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # numpy and ml_dtypes come from this environment; nothing else does.
    for package in Path(numpy.__file__).parent.parent.iterdir():
        if package.name.split("-")[0].split(".")[0] in {"numpy", "ml_dtypes"}:
            (site / package.name).symlink_to(package)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    subprocess.run([python, "-c", TRY], cwd=tmp_path, env=environment, check=True)
