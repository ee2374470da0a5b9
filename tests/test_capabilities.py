from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.capabilities import require


def test_an_absent_capability_skips_with_its_name(monkeypatch):
    monkeypatch.setenv("PAGECORE_REQUIRE", "torch")
    with pytest.raises(pytest.skip.Exception, match="needs no_such_module"):
        require("no_such_module")


def test_a_required_capability_fails_instead(monkeypatch):
    monkeypatch.setenv("PAGECORE_REQUIRE", "torch, no_such_module")
    with pytest.raises(pytest.fail.Exception, match="no_such_module is required"):
        require("no_such_module")


def test_an_installed_module_is_imported():
    assert require("json").__name__ == "json"


@pytest.mark.slow
def test_tests_of_frameworks_are_skipped_without_them():
    code = (
        "import sys, pytest; sys.modules |= dict.fromkeys(['torch', 'transformers', 'jax', 'jaxlib']); "
        "sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', 'tests/interop', 'tests/gpu']))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PAGECORE_REQUIRE"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout
