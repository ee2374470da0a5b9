"""The code of README.md and of the pages in docs runs, and prints what its comments say; links lead to files."""

import re
from pathlib import Path

import pytest

from tests.capabilities import require

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
FOLDERS = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".") and path.name != "build"]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))])
PAGES.remove(ROOT / "CHANGELOG.md")  # it names files that are gone
# Pages without code of their own.
PROSE = {"README", "architecture", "glossary", "CONTRIBUTING", "SECURITY", "mooncake"}
GUIDES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem not in PROSE)]
FRAMEWORKS = [page for page in PAGES if page.stem in {"numpy", "torch", "jax", "transformers"}]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_code_runs_and_prints_the_promised_output(page, interpreters):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    code = "\n".join(blocks)
    frameworks = re.findall(r"^(?:from|import) (torch|transformers|jax)\b", code, re.MULTILINE)
    for framework in frameworks:
        require(framework)
    ran = interpreters.run_with_frameworks(frameworks, code)
    assert ran.returncode == 0, ran.stderr
    promised = re.findall(r"print\(.*?\)\s*# (.*)", code)
    assert promised
    assert ran.stdout.splitlines() == promised


@pytest.mark.parametrize("page", FRAMEWORKS, ids=lambda page: page.stem)
def test_a_page_has_the_sections_that_the_readme_promises(page):
    parts = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    assert parts[0] == "The shortest loop"
    for topic in ("copied", "Streams", "refused", "Versions"):
        assert any(topic in part for part in parts), topic


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page):
    text = page.read_text()
    named = re.findall(r"`((?:examples|docs|bench|tests|pagecore|cuda_src)/[\w./]+)`", text)
    linked = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if not link.startswith("http")]
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in linked if not (page.parent / link).exists()]
    assert not missing
