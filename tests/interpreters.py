"""Interpreters that have imported expensive modules, and fork a process for each program that a test runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
TORCH = (
    "pagecore.interop.transformers",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
)

# Garbage collection takes a quarter of the time of the imports, and finds none. The child leaves the loop and ends as a
# program does. JAX and other modules with threads must not be imported here.
SERVER = """
import gc, importlib, json, os, sys, types
gc.disable()
for name in sys.argv[1:]:
    importlib.import_module(name)
gc.freeze()
gc.enable()
for line in sys.stdin:
    request = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, name in enumerate((os.devnull, request["out"], request["err"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    sys.stdin = open(os.devnull)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = request["argv"]
    sys.path[:0] = request["path"]
    main.__file__ = request["file"]
    exec(compile(request["code"], request["file"], "exec"), main.__dict__)
    break
else:
    os._exit(0)
"""


class Interpreter:
    """A process that has imported modules; `run` forks it.

    A program finds the modules imported, and otherwise what it finds in a new interpreter that starts in the root of
    the repository.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},  # this tree, installed or not
        )

    def run(self, program: Path | str, *arguments: str, path: Iterable[Path] = ()) -> subprocess.CompletedProcess[str]:
        """Run a file, or source text, in a process of its own; `path` precedes ``sys.path``."""
        is_file = isinstance(program, Path)
        name, code = (str(program), program.read_text()) if isinstance(program, Path) else ("-c", program)
        with TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            request = {
                "argv": [name, *arguments],
                "path": [*([str(Path(name).parent)] if is_file else []), *map(str, path)],
                "file": name,
                "code": code,
                "out": str(out),
                "err": str(err),
            }
            assert self.server.stdin is not None
            assert self.server.stdout is not None
            self.server.stdin.write(json.dumps(request) + "\n")
            self.server.stdin.flush()
            status = self.server.stdout.readline()
            assert status, f"the interpreter ended with {self.server.wait()}"
            return subprocess.CompletedProcess(request["argv"], int(status), out.read_text(), err.read_text())

    def close(self) -> None:
        for pipe in (self.server.stdin, self.server.stdout):
            assert pipe is not None
            pipe.close()
        self.server.wait()


class Interpreters:
    """Interpreters by the modules that they have imported; each starts with its first program."""

    def __init__(self) -> None:
        self._started: dict[tuple[str, ...], Interpreter] = {}

    def with_modules(self, *modules: str) -> Interpreter:
        if modules not in self._started:
            self._started[modules] = Interpreter(modules)
        return self._started[modules]

    def run_with_frameworks(
        self, frameworks: Iterable[str], program: Path | str, *arguments: str, path: Iterable[Path] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a program that imports some of torch, transformers and JAX."""
        needs = set(frameworks)
        if "jax" in needs:  # its threads do not survive a fork
            alone = Interpreter(())
            try:
                return alone.run(program, *arguments, path=path)
            finally:
                alone.close()
        modules = TORCH if needs & {"torch", "transformers"} else ("pagecore",)
        return self.with_modules(*modules).run(program, *arguments, path=path)

    def close(self) -> None:
        for interpreter in self._started.values():
            interpreter.close()
