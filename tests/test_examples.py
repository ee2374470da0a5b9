"""Every example runs as it stands, where the frameworks that it imports are."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.capabilities import require

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_the_example_runs(path):
    for framework in re.findall(r"^(?:import|from) (jax|torch|transformers)\b", path.read_text(), re.MULTILINE):
        require(framework)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # this tree, installed or not
    ran = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
