"""A user's file is known by its own bytes and by those of the modules beside it that it imports."""

import hashlib
from pathlib import Path

import pytest

from penstock.pipeline.config.plugins import source_digest

FILES = {
    "rew.py": "import helper\nfrom judge.parts import score\n\ndef f(): ...\n",
    "helper.py": "def g():\n    import deep\n    return deep.N\n",
    "deep.py": "import helper\nN = 1\n",
    "judge/__init__.py": "",
    "judge/parts.py": "from .more import x\n\ndef score(): ...\n",
    "judge/more.py": "x = 1\n",
    "other.py": "import rew\n",
    "plain.py": "import json\n\ndef f(): ...\n",
    "broken.py": "def f(:\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


IMPORTED = ("rew.py", "helper.py", "deep.py", "judge/__init__.py", "judge/parts.py", "judge/more.py")


@pytest.mark.parametrize("name", [*IMPORTED, "other.py", "plain.py", "new.py"])
def test_a_change_of_any_imported_file_is_a_change_and_one_of_another_file_beside_is_none(folder: Path, name: str) -> None:
    before = source_digest("rew.py:f", base_dir=folder)
    (folder / name).write_text(FILES.get(name, "") + "# changed\n")
    assert (source_digest("rew.py:f", base_dir=folder) != before) == (name in IMPORTED)


@pytest.mark.parametrize("name", ["plain.py", "broken.py"])
def test_a_file_that_imports_nothing_beside_it_has_the_digest_of_its_bytes(folder: Path, name: str) -> None:
    assert source_digest(f"{name}:f", base_dir=folder) == hashlib.sha256(FILES[name].encode()).hexdigest()


def test_the_digest_does_not_depend_on_where_the_folder_is(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before, elsewhere = source_digest("rew.py:f", base_dir=folder), tmp_path_factory.mktemp("elsewhere") / "moved"
    folder.rename(elsewhere)
    assert source_digest("rew.py:f", base_dir=elsewhere) == before
