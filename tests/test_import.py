"""Modules that `import pagecore` loads: none that makes it slow to start."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pagecore

ROOT = Path(__file__).parent.parent
# Each takes milliseconds to load or loads dozens of others, and a cache needs none of them before its first use.
HEAVY = {
    "asyncio",
    "base64",
    "concurrent",
    "csv",
    "decimal",
    "email",
    "fractions",
    "hashlib",
    "http",
    "importlib.metadata",
    "importlib.resources",
    "json",
    "logging",
    "multiprocessing",
    "pagecore.cli",
    "pagecore.interop",
    "pagecore.models",
    "pagecore.ops.cuda.compilation.compiler",
    "pagecore.serving",
    "pdb",
    "pydoc",
    "random",
    "secrets",
    "shutil",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "tomllib",
    "unittest",
    "urllib.request",
    "xml",
    "zipfile",
}
PROGRAM = """
import sys
import numpy, ml_dtypes
known = set(sys.modules)
import pagecore
print(*(set(sys.modules) - known))
"""


def is_within(module, package):
    return module == package or module.startswith(package + ".")


def test_import_pagecore_loads_nothing_heavy_beyond_numpy_and_ml_dtypes():
    output = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    loaded = set(output.split())
    assert "pagecore.cache" in loaded
    assert {module for module in loaded for package in HEAVY if is_within(module, package)} == set()


def test_version_is_read_from_the_package_without_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "pagecore.__version__"
    assert f'\n__version__ = "{pagecore.__version__}"\n' in (ROOT / "pagecore/__init__.py").read_text()


def loaded_by(statement, package):
    program = f"import sys; {statement}; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    return {module for module in output.split() if is_within(module, package)}


@pytest.mark.slow
@pytest.mark.parametrize("package", ["pagecore.serving", "pagecore.tiers"])
def test_a_package_loads_no_module_before_a_name_is_used(package):
    assert loaded_by(f"import {package}", package) == {package}


@pytest.mark.slow
def test_serving_and_tiers_load_the_module_of_a_name_at_its_first_use():
    loaded = loaded_by("from pagecore.serving import Scheduler, Request", "pagecore.serving")
    assert "pagecore.serving.scheduling.scheduler" in loaded
    assert not {f"pagecore.serving.{other}" for other in ("planner", "replay", "whatif", "prometheus")} & loaded
    loaded = loaded_by("from pagecore.tiers import HostTier", "pagecore.tiers")
    assert "pagecore.tiers.host.tier" in loaded
    assert not {f"pagecore.tiers.{other}" for other in ("remote", "disk", "events", "handover")} & loaded


@pytest.mark.parametrize("package", ["serving", "tiers"])
def test_a_package_exports_each_name_of_its_list(package):
    module = importlib.import_module(f"pagecore.{package}")
    listed = [name for names in module._MODULES.values() for name in names]
    assert sorted(listed) == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
        assert name in dir(module)
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        module.Engine  # noqa: B018
