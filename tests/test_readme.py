"""The README's tour runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_tour_runs_and_prints_what_it_says():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    ran = subprocess.run([sys.executable, "-c", blocks[0]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    promised = re.findall(r"print\(.*?\)\s*# (.*)", blocks[0])
    assert ran.stdout.splitlines() == promised
