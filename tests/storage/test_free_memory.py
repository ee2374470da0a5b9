"""Free memory of the host: the limit of a cgroup, whose page cache can be reclaimed."""

import pytest

from pagecore.storage import free_memory
from pagecore.storage.memory import budgets

GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 100 * GIB),
        ({"memory.max": "max", "memory.current": "5"}, 100 * GIB),
        ({"memory.max": str(8 * GIB)}, 100 * GIB),
        ({"memory.max": str(8 * GIB), "memory.current": str(6 * GIB)}, 2 * GIB),
        (
            {
                "memory.max": str(8 * GIB),
                "memory.current": str(6 * GIB),
                "memory.stat": f"file 7\ninactive_file {3 * GIB}\nactive_file 9\n",
            },
            5 * GIB,
        ),
        ({"memory.max": str(8 * GIB), "memory.current": str(9 * GIB), "memory.stat": "anon 1\n"}, 0),
        ({"memory.max": str(800 * GIB), "memory.current": str(6 * GIB)}, 100 * GIB),
    ],
)
def test_free_memory_within_a_cgroup(tmp_path, monkeypatch, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(budgets, "CGROUP", tmp_path)
    monkeypatch.setattr(budgets, "_host_available", lambda: 100 * GIB)
    assert free_memory() == expected
