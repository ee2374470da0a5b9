"""Hooks of tests/conftest.py: --cases, the reports of parallel workers, and garbage collection."""

import gc
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.conftest import pytest_keep_few_cases


class Item:
    def __init__(self, nodeid):
        self.nodeid = nodeid


def kept(names, most):
    """Return the names of the tests that remain with ``--cases most``; the others are reported as deselected."""
    items, dropped = [Item(name) for name in names], []

    def pytest_deselected(items):
        dropped.extend(items)

    hook = SimpleNamespace(pytest_deselected=pytest_deselected)
    pytest_keep_few_cases(SimpleNamespace(option=SimpleNamespace(cases=most), hook=hook), items)
    assert sorted(item.nodeid for item in items + dropped) == sorted(names)
    return [item.nodeid for item in items]


def cases(test, count):
    return [f"{test}[{number}]" for number in range(count)]


@pytest.mark.parametrize(
    ("count", "most", "expected"), [(7, 2, [0, 4]), (7, 3, [0, 3, 6]), (2, 2, [0, 1]), (5, 1, [0])]
)
def test_cases_are_evenly_spaced_from_the_first(count, most, expected):
    names = cases("a.py::test", count)
    assert kept(names, most) == [names[number] for number in expected]


def test_each_test_keeps_cases_of_its_own_in_order():
    names = [*cases("a.py::one", 3), "a.py::plain", *cases("b.py::one", 4), "b.py::A::one[x[1]-2]", "b.py::A::one[y]"]
    assert kept(names, 1) == ["a.py::one[0]", "a.py::plain", "b.py::one[0]", "b.py::A::one[x[1]-2]"]


def test_without_the_option_every_case_is_kept():
    assert kept(cases("a.py::one", 9), None) == cases("a.py::one", 9)


def sent(monkeypatch, outcomes):
    """Return the phases that a worker reports of a test whose phases end as in `outcomes`."""
    reports = [SimpleNamespace(when=when, passed=outcome == "passed") for when, outcome in outcomes.items()]
    monkeypatch.setattr(conftest, "runtestprotocol", lambda *arguments, **options: reports)
    seen = []
    hook = SimpleNamespace(pytest_runtest_logreport=lambda report: seen.append(report.when))
    assert conftest.pytest_runtest_protocol(SimpleNamespace(ihook=hook), None)
    return seen


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({"setup": "passed", "call": "passed", "teardown": "passed"}, ["call"]),
        ({"setup": "passed", "call": "failed", "teardown": "passed"}, ["call"]),
        ({"setup": "passed", "call": "passed", "teardown": "failed"}, ["call", "teardown"]),
        ({"setup": "failed", "teardown": "passed"}, ["setup"]),
        ({"setup": "skipped", "teardown": "passed"}, ["setup"]),
    ],
    ids=str,
)
def test_a_worker_reports_each_call_and_each_phase_that_did_not_pass(monkeypatch, outcomes, expected):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert sent(monkeypatch, outcomes) == expected


def test_one_process_reports_as_pytest_does(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert conftest.pytest_runtest_protocol(None, None) is None


@pytest.mark.parametrize("error", [None, RuntimeError("a test file is wrong")], ids=["collected", "failed"])
def test_garbage_is_not_collected_while_tests_are_and_is_afterwards(error):
    collection = conftest.pytest_collect_without_garbage_collection()
    next(collection)
    assert not gc.isenabled()
    with pytest.raises(StopIteration if error is None else RuntimeError):
        collection.throw(error) if error else collection.send(True)
    assert gc.isenabled()


def test_a_worker_imports_its_share_first_and_leaves_errors_to_the_collection(monkeypatch, tmp_path):
    monkeypatch.setattr(conftest, "FOLDER", tmp_path / "tests")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    imported = []

    def load(name):
        imported.append(name)
        if name.endswith("c"):
            pytest.skip("needs x", allow_module_level=True)
        if name.endswith("d"):
            raise ImportError

    monkeypatch.setattr(conftest.importlib, "import_module", load)
    conftest.import_from_own_share([tmp_path / "tests" / "a" / f"test_{each}.py" for each in "abcdef"])
    assert imported == [f"tests.a.test_{each}" for each in "cdef"]
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    conftest.import_from_own_share([tmp_path / "tests" / "test_a.py"])
    assert len(imported) == 4
