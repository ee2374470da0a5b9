"""C++ drivers of the native code without a sanitizer: they build, pass, and report planted faults.

``make sanitize`` runs the same drivers under ASan, UBSan and TSan.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

import pagecore
from tests.capabilities import missing

ROOT = Path(__file__).parent.parent.parent
NATIVE = ROOT / "tests" / "native"


def make(*arguments):
    if not (shutil.which("make") and shutil.which("g++")):
        missing("g++", "the drivers are built by make and g++")
    command = ["make", "-f", "tests/native/sanitize.mk", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_drivers_pass_without_a_sanitizer():
    # The libraries of the package itself, if make or pip has built them here.
    built = sorted(ROOT.glob("build/temp.*/libpagecore_index.a"), key=lambda each: each.stat().st_mtime)
    package = [f"LIBRARIES={each.parent.relative_to(ROOT)}" for each in built[-1:]]
    isas = pagecore.available_isas()
    # Emulated tiles need the AVX-512 of the level below; elsewhere, their kernels would be compiled and never run.
    if package and ("x86-64-v4-amx" in isas or "x86-64-v4-bf16" not in isas):
        package.append("AMX=hardware")
    ran = make("-j2", "plain", "SCALE=0.2", *package)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("tests passed") == 4


@pytest.mark.slow
def test_make_sanitize_builds_every_source_of_the_native_rooms():
    recipe = make("--dry-run", "--always-make", "asan", "tsan")
    assert recipe.returncode == 0, recipe.stderr
    sources = [path for room in ("index", "ops", "tiers") for path in ROOT.glob(f"pagecore/{room}/**/*.cpp")]
    sources = [path for path in sources if path.parent.name != "isa"]
    for source in sources:
        for kind in ("asan", "tsan"):
            assert f'echo "{kind} {source.relative_to(ROOT)}"' in recipe.stdout


def test_every_planted_fault_must_be_reported_by_name(tmp_path):
    driver = tmp_path / "driver"
    script = ["sh", str(NATIVE / "expect_fault.sh"), str(driver)]

    def verdict(body):
        driver.write_text(f"#!/bin/sh\n[ $1 = --plants ] && {{ printf 'leak\\tLeak: found\\n'; exit; }}\n{body}\n")
        driver.chmod(0o755)
        return subprocess.run(script, capture_output=True, text=True, check=False)

    assert verdict("echo Leak: found; exit 1").returncode == 0
    assert "went unnoticed" in verdict("exit 0").stderr
    assert "was not reported" in verdict("echo something else; exit 1").stderr


def test_a_driver_without_planted_faults_is_taken_for_one_without_a_sanitizer(tmp_path):
    driver = tmp_path / "driver"
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    ran = subprocess.run(
        ["sh", str(NATIVE / "expect_fault.sh"), str(driver)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "no planted faults" in ran.stderr
