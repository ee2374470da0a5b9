"""The code of README.md and of the pages in docs runs, and prints what its comments say; links lead to files."""

import re
from pathlib import Path

import numpy as np
import pytest

from pagecore import AttentionSpec, LatentSpec, dequantize, quantize
from pagecore.models.multimodal.known_types import known_types
from tests.capabilities import require

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
FOLDERS = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".") and path.name != "build"]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))])
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


def _rows(page, section):
    """Yield the cells of each row of the first table of a section."""
    text = (ROOT / page).read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    for line in text.splitlines():
        if line.startswith("| ") and "`" in line:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def _percent(numbers, format, part=slice(None)):
    """Return the error of stored numbers in percent of their norm."""
    codes, scales = quantize(numbers, format)
    read = dequantize(codes, format) if scales is None else dequantize(codes, format, scales)
    return 100 * np.linalg.norm((read - numbers)[..., part]) / np.linalg.norm(numbers[..., part])


def test_the_table_of_formats_has_their_bytes_and_errors():
    numbers = np.random.default_rng(0).normal(size=(1000, 1, 128)).astype(np.float32)
    rows = list(_rows("docs/formats.md", "The formats"))
    assert len(rows) == 8
    for names, _, _, row_bytes, error, _ in rows:
        for name in re.findall("`(.*?)`", names):
            planes = {plane.name: plane.nbytes for plane in AttentionSpec(1, 128, format=name).planes}
            assert planes["key"] + planes.get("key_scale", 0) == int(row_bytes), name
            assert _percent(numbers, name) == pytest.approx(float(error.split()[0]), rel=0.03), name


def test_the_table_of_latents_has_their_bytes_and_errors():
    numbers = np.random.default_rng(0).normal(size=(1000, 1, 576)).astype(np.float32)
    rows = list(_rows("docs/latents.md", "Formats"))
    assert len(rows) == 3
    for names, row_bytes, *errors in rows:
        (name,) = re.findall("`(.*?)`", names)
        assert LatentSpec(scale=1, format=name).planes[0].nbytes == int(row_bytes)
        for part, error in zip((slice(512), slice(512, None)), errors, strict=True):
            assert _percent(numbers, name, part) == pytest.approx(float(error.split()[0]), rel=0.03), name


def test_the_readme_counts_the_model_types():
    (count,) = re.findall(r"about (\d+) model types", (ROOT / "README.md").read_text())
    assert int(count) == pytest.approx(len(known_types()), rel=0.05)
