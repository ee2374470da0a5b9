"""``python -m bench NAME [--json FILE]``."""

import argparse
import importlib
import json
from pathlib import Path

from bench.runner import machine

NAMES = ("prepare", "attention")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Time pagecore against named controls.")
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json", type=Path, help="write machine, versions and figures to this file")
    options = parser.parse_args()
    where = machine()
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    results = {}
    for name in options.names:
        print(f"\n{name}")
        results[name] = importlib.import_module(f"bench.{name}").run()
    if options.json:
        options.json.write_text(json.dumps({"machine": where, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
