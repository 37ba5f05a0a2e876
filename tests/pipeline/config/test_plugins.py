"""A user's functions: found by name, loaded apart from ours, and every failure one line."""

import pickle
import sys
from pathlib import Path

import pytest

from penstock.pipeline.config.plugins import PluginError, load, source_digest
from tests.support.refusals import one_line


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_a_function_of_a_module_and_of_a_file_is_loaded(tmp_path: Path) -> None:
    written(tmp_path, "mine.py", "def double(x):\n    return 2 * x\n")
    assert load("math:sqrt")(9) == 3.0
    assert load("mine.py:double", base_dir=tmp_path)(4) == 8
    assert load(f"{tmp_path}/mine.py:double")(4) == 8


def test_a_file_loads_once_and_anew_when_it_changes(tmp_path: Path) -> None:
    file = written(tmp_path, "mine.py", "def f():\n    return 1\n")
    first = load(f"{file}:f")
    assert load(f"{file}:f") is first
    written(tmp_path, "mine.py", "def f():\n    return 2\n")
    assert load(f"{file}:f")() == 2


def test_a_file_has_the_name_by_which_processes_of_its_functions_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for number in (1, 2):
        file = written(tmp_path, "only_here.py", f"def f():\n    return {number}\n")
        found = load(f"{file}:f")
        assert pickle.loads(pickle.dumps(found))() == number
    del sys.modules["only_here"]


@pytest.mark.parametrize("name", ["json.py", "penstock.py", "typing.py", "two words.py", "__main__.py", "class.py"])
def test_a_file_whose_name_means_another_module_has_a_private_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = sys.modules.get(name.removesuffix(".py"))
    found = load(f"{written(tmp_path, name, 'def f():' + chr(10) + '    return 1' + chr(10))}:f")
    assert found() == 1
    if known is not None:
        assert found.__module__.startswith("penstock_plugin_")
        assert sys.modules[name.removesuffix(".py")] is known


def test_a_users_own_penstock_folder_does_not_shadow_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    written(tmp_path, "penstock/__init__.py", "raise RuntimeError('the wrong one')\n")
    written(tmp_path, "helper.py", "NUMBER = 7\n")
    written(tmp_path, "mine.py", "import helper, penstock\nOURS = penstock.__file__\ndef f():\n    return helper.NUMBER, OURS\n")
    number, ours = load("mine.py:f", base_dir=tmp_path)()
    assert number == 7
    assert str(tmp_path) not in str(ours)
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mine.py:duble", ["no function 'duble'", "did you mean 'double'?"]),
        ("mime.py:double", ["mime.py does not exist", "did you mean 'mine.py'?"]),
        ("mine.py:NUMBER", ["is a int, not a function"]),
        ("nowhere_at_all.module:f", ["there is no Python module 'nowhere_at_all'"]),
        ("json.decoderr:f", ["there is no Python module 'json.decoderr'", "did you mean 'decoder'?"]),
        ("mine.py", ["expected package.module:function or path/file.py:function"]),
        ("syntax.py:f", ["fails while it is imported", "SyntaxError"]),
        ("raises.py:f", ["fails while it is imported", "KeyError", "raises.py line 2"]),
        ("needs.py:f", ["fails while it is imported", "No module named 'no_such_package_here'"]),
        ("leaves.py:f", ["fails while it is imported", "SystemExit"]),
    ],
)
def test_what_is_missing_is_named_in_one_line(tmp_path: Path, spec: str, words: list[str]) -> None:
    written(tmp_path, "mine.py", "NUMBER = 3\ndef double(x):\n    return 2 * x\n")
    written(tmp_path, "syntax.py", "def f(:\n")
    written(tmp_path, "raises.py", "a = {}\na['b']\n")
    written(tmp_path, "needs.py", "import no_such_package_here\n")
    written(tmp_path, "leaves.py", "import sys\nsys.exit(3)\n")
    with one_line(PluginError) as caught:
        load(spec, base_dir=tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_the_source_digest_is_known_without_running_the_source_and_follows_its_content(tmp_path: Path) -> None:
    written(tmp_path, "mine.py", "raise RuntimeError('must not run')\n")
    first = source_digest("mine.py:f", base_dir=tmp_path)
    assert first == source_digest("mine.py:f", base_dir=tmp_path)
    written(tmp_path, "mine.py", "raise RuntimeError('must not run either')\n")
    assert source_digest("mine.py:f", base_dir=tmp_path) != first
    assert len(source_digest("json.decoder:JSONDecoder")) == 64
    with pytest.raises(PluginError, match="there is no Python module"):
        source_digest("json.nothing:f")
