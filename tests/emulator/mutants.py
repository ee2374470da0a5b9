"""Kernels with one synchronisation removed; the emulator should find an error in each of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.emulator.build import SOURCES
from tests.emulator.runtime import EmulatedRuntime

SYNCHRONISATION = re.compile(
    r"pc_(?:sync_block|sync_warp|fence_device|commit_copies)\(\);|pc_wait_copies<([^;]*)>\(\);"
)


@dataclass(frozen=True)
class Mutant:
    """A source file in which one call is removed, or one wait leaves one group more in flight."""

    file: str
    line: int
    call: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.call}"


def mutants(files: Iterable[str]) -> Iterator[Mutant]:
    """Yield a mutant for each synchronisation of some files of cuda_src."""
    for file in files:
        text = (SOURCES / file).read_text()
        for found in SYNCHRONISATION.finditer(text):
            instead = ";" if found[1] is None else f"pc_wait_copies<({found[1]}) + 1>();"
            line = text.count("\n", 0, found.start()) + 1
            yield Mutant(file, line, found[0], text[: found.start()] + instead + text[found.end() :])


def survivors(
    folder: Path, files: Iterable[str], work: Callable[[EmulatedRuntime], None], seeds: Sequence[int] = (0, 1)
) -> list[str]:
    """Return the mutants that `work` runs without an error of the emulator or of its own assertions.

    Raises
    ------
    AssertionError
        `work` fails without a mutant; EmulatorError is an AssertionError.
    """

    def run(*where: Path) -> None:
        for seed in seeds:
            runtime = EmulatedRuntime(*where, seed=seed)
            work(runtime)
            runtime.finish()

    run()
    found = []
    for number, mutant in enumerate(mutants(files)):
        sources = Path(shutil.copytree(SOURCES, folder / str(number) / SOURCES.name))
        (sources / mutant.file).write_text(mutant.text)
        try:
            run(sources, folder)
        except AssertionError:
            continue
        found.append(str(mutant))
    return found
