"""The code of docs/jax.md runs as it stands, one piece after another; so do the examples in docstrings."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_code_runs_and_prints_what_it_says(jax):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "jax.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    code = "\n".join(blocks)
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == re.findall(r"print\(.*?\)\s*# (.*)", code)


def test_the_examples_in_docstrings_give_what_they_say(interop):
    for name in interop.__all__:
        example = doctest.DocTestParser().get_doctest(getattr(interop, name).__doc__, {}, name, None, 0)
        said: list[str] = []
        doctest.DocTestRunner(verbose=False).run(example, out=said.append)
        assert not said, "".join(said)
