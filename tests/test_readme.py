"""The README's code runs as it stands, one piece after another."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_code_runs_and_prints_what_it_says():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    code = "\n".join(blocks)
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    promised = re.findall(r"print\(.*?\)\s*# (.*)", code)
    assert ran.stdout.splitlines() == promised
