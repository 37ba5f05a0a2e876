"""Packages that are left out: only meanwhile, and only where they were not imported before."""

import importlib
import sys
from importlib.util import find_spec

import pytest

from penstock.infra.engines import packages
from penstock.infra.engines.packages import left_out


def test_within_the_block_a_package_is_missing_and_afterwards_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "UNUSED", ("antigravity",))
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    with left_out():
        assert find_spec("antigravity") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("antigravity")
    assert find_spec("antigravity") is not None


def test_more_packages_can_be_hidden_for_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    with left_out("antigravity"):
        assert find_spec("antigravity") is None
    assert find_spec("antigravity") is not None


def test_a_package_that_is_imported_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "UNUSED", ("json",))
    with left_out():
        assert importlib.import_module("json") is sys.modules["json"] is not None
    assert sys.modules["json"] is not None


def test_an_error_within_the_block_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "UNUSED", ("antigravity",))
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    with pytest.raises(ZeroDivisionError), left_out():
        raise ZeroDivisionError
    assert "antigravity" not in sys.modules
