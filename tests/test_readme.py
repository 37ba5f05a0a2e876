"""What README and docs say is there is there: the tree, the commands and the files.

`python tests/test_readme.py` rewrites the tree in README.md from the first sentence of each folder's docstring.
"""

import ast
import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("topics", "infra", "pipeline", "workers", "penstock")
BEGIN, END = "<!-- tree -->\n```\n", "```\n<!-- /tree -->"
WIDTH = 16
SHOWN = 128
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = {
    "examples": "Configurations to start from, with a reward, a data set, a loss and an agent of a user's own",
    "benchmarks": "Measurements: schedules, engines, kills, outages, replays, exports; each prints what it compares with",
    "deploy": "Images, Compose, Kubernetes, Slurm, Prometheus and Grafana; nothing else needs them",
    "docs": "Tutorial, reference and explanations",
    "tests": "Mirror the packages; `support/` holds what tests share",
}
UNNAMED = {"__pycache__", "build", "dist"}
"""Folders that are made here and not part of the repository, beside hidden ones and `*.egg-info`."""


def gist(path: Path) -> str:
    """The first clause of a module's docstring.

    Example:
        gist(ROOT / "topics" / "record.py")  # -> "A record as the log carries it: bytes and headers, not yet believed"
    """
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    first = re.sub(r"^`[^`]*`: ", "", first)
    first = re.split(r"(?<!Dr)\. |\.$|; |, so that ", first, maxsplit=1)[0]
    if len(first) <= SHOWN:
        return first
    short = first.partition(": ")[0]
    return short if SHOWN // 3 < len(short) <= SHOWN else first[:SHOWN].rsplit(" ", 1)[0].rstrip(",:") + " …"


def tree() -> str:
    """The packages and the folders in them as README.md draws them: a folder, and the first clause of its docstring."""
    lines: list[str] = []
    for name in PACKAGES:
        lines.append(f"{name + '/':<{WIDTH}} {gist(ROOT / name / '__init__.py')}")
        for folder in sorted(path.parent for path in (ROOT / name).glob("*/__init__.py") if not path.parent.is_symlink()):
            lines.append(f"{'  ' + folder.name + '/':<{WIDTH}} {gist(folder / '__init__.py')}")
    lines += [f"{name + '/':<{WIDTH}} {purpose}" for name, purpose in OTHERS.items()]
    return "\n".join(lines) + "\n"


def drawn(text: str) -> str:
    return text.partition(BEGIN)[2].partition(END)[0]


def test_the_tree_in_the_readme_is_the_one_on_disk() -> None:
    assert drawn(DOCS[0].read_text(encoding="utf-8")) == tree(), "rewrite it with: python tests/test_readme.py"


def test_the_tree_has_a_line_for_every_folder_at_the_top() -> None:
    there = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.*"))}
    there = {name for name in there if name not in UNNAMED and not name.startswith(".") and not name.endswith(".egg-info")}
    assert {*PACKAGES, *OTHERS} == there


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(path: Path) -> None:
    named = re.findall(
        r"`((?:topics|infra|pipeline|workers|tests|examples|docs|benchmarks|deploy|\.ci)/[\w./-]*)`", path.read_text(encoding="utf-8")
    )
    named += re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    missing = [name for name in named if not (ROOT / name).exists() and not (path.parent / name).exists()]
    assert missing == []


def test_every_test_that_the_security_page_names_exists() -> None:
    text = (ROOT / "docs" / "explanation" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    missing = [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")]
    assert (missing, len(re.findall(r"^\|\d+\|", text, re.MULTILINE))) == ([], 15)


@cache
def help_of(words: tuple[str, ...]) -> str:
    from penstock.pipeline.cli import main

    with redirect_stdout(io.StringIO()) as shown:
        assert main([*words, "--help"]) == 0, f"penstock {' '.join(words)}"
    return shown.getvalue()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_command_that_is_named_exists(path: Path) -> None:
    for words, options in set(commands(path.read_text(encoding="utf-8"))):
        shown = help_of(words)
        assert [option for option in options if option not in shown] == [], f"{path.name}: penstock {' '.join(words)}"


def commands(text: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Each `penstock ...` in code: its command words and its long options."""
    for line in re.findall(r"`(?:\.venv/bin/)?penstock ([^`]+)`", text) + re.findall(
        r"^\s*(?:\.venv/bin/)?penstock ([^#\n]+)", text, re.MULTILINE
    ):
        words = line.split()
        depth = 2 if words[0] in ("topics", "broker", "model", "replay", "runs") else 1
        options = tuple(word.partition("=")[0] for word in words if word.startswith("--"))
        for alternative in words[depth - 1].split("|") if len(words) >= depth else [""]:
            yield tuple(filter(None, [*words[: depth - 1], alternative])), options


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_make_target_that_is_named_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", path.read_text(encoding="utf-8"))) <= targets


def test_every_key_in_the_table_for_readers_of_trl_exists() -> None:
    from penstock.pipeline.config.run_config import Config

    there = {f"{name}.{key}" for name, field in Config.model_fields.items() for key in field.annotation.model_fields}  # type: ignore[union-attr]
    sections = "|".join(Config.model_fields)
    rows = [
        line.strip("|").split("|")
        for line in (ROOT / "docs" / "how-to" / "from-trl.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|`")
    ]
    named = {key for row in rows for key in re.findall(rf"`((?:{sections})\.\w+)", " ".join(row[1:]))}
    assert len(named) > 40
    assert named <= there, named - there


if __name__ == "__main__":
    readme = DOCS[0].read_text(encoding="utf-8")
    before, after = readme.partition(BEGIN)[0], readme.partition(END)[2]
    DOCS[0].write_text(before + BEGIN + tree() + END + after, encoding="utf-8")
