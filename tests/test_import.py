"""Modules that `import pagecore` loads: none that makes it slow to start."""

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
    "logging",
    "multiprocessing",
    "pagecore.cli",
    "pagecore.interop",
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


def loaded_by(statement):
    program = f"import sys; {statement}; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    return {module for module in output.split() if is_within(module, "pagecore.serving")}


def test_serving_loads_the_module_of_a_name_at_its_first_use():
    assert loaded_by("import pagecore.serving") == {"pagecore.serving"}
    loaded = loaded_by("from pagecore.serving import Scheduler, Request")
    assert "pagecore.serving.scheduling.scheduler" in loaded
    assert not {f"pagecore.serving.{other}" for other in ("planner", "replay", "whatif", "prometheus")} & loaded


def test_serving_exports_each_name_of_its_list():
    import pagecore.serving

    assert sorted(pagecore.serving._HOMES) == sorted(pagecore.serving.__all__)
    for name in pagecore.serving.__all__:
        assert getattr(pagecore.serving, name).__name__ == name
        assert name in dir(pagecore.serving)
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        pagecore.serving.Engine  # noqa: B018
