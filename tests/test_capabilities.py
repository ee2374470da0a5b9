from __future__ import annotations

import pytest

from tests.capabilities import require


def test_an_absent_capability_skips_with_its_name(monkeypatch):
    monkeypatch.setenv("PAGECORE_REQUIRE", "torch")
    with pytest.raises(pytest.skip.Exception, match="needs no_such_module"):
        require("no_such_module")


def test_a_required_capability_fails_instead(monkeypatch):
    monkeypatch.setenv("PAGECORE_REQUIRE", "torch, no_such_module")
    with pytest.raises(pytest.fail.Exception, match="no_such_module is required"):
        require("no_such_module")


def test_an_installed_module_is_imported():
    assert require("json").__name__ == "json"
