"""Structure of the source tree: sizes of files and folders, imports in one direction, no cycles, and budgets that may only fall.

`python -m tests.test_house` lowers the budgets to the figures of the tree.
"""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.house import file_lines, folder_widths, import_cycles, import_graph, loose_modules, single_importers

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "scheduling",
    "algorithms",
    "config",
    "data",
    "rewards",
    "agents",
    "runtime",
    "learner",
    "inspect",
    "launch",
    "replay",
    "archive",
    "cli",
)
"""The packages of `pipeline/` from the foundation up: each may import itself and those before it."""
FORMER = "envs"
"""Former import path of `pipeline/data/tokenization.py`; nothing here imports it."""
WIDTH_LIMIT = 15
"""Most entries of a folder; `topics/` has 14 and a former import path."""
FILE_LINES_LIMIT = 450
SINGLE_IMPORTER_BUDGET = 60
"""Most modules that one other module imports."""
LINES_BUDGET = 67_500
"""Most lines of the product."""
SUSPECT = re.compile(r"raise_signal|interrupt_main|SetAsyncExc|getpid|getpgrp|get_ident")
NEVER_CALLED = frozenset({"raise_signal", "interrupt_main", "PyThreadState_SetAsyncExc"})
APART = "inspect.audit"
"""Apart from them: it imports none of them, and only the command line imports it."""


def package_of(module: str) -> str | None:
    """The package of `pipeline/` that a module is in, or None if it is in another layer."""
    match = re.match(rf"pipeline\.({re.escape(APART)}(?=\.|$)|\w+)", module)
    return match and match[1]


@functools.cache
def graph_of_product() -> dict[str, set[str]]:
    return import_graph(ROOT)


def against_the_order(graph: dict[str, set[str]]) -> list[str]:
    """Imports inside `pipeline/` that point up."""
    problems = []
    for module, targets in graph.items():
        for target in targets:
            source, aim = package_of(module), package_of(target)
            if source is None or aim is None or source == aim:
                continue
            if APART in (source, aim):
                if (source, aim) != ("cli", APART):
                    problems.append(f"{module} imports {target}")
            elif source != FORMER and PACKAGES.index(aim) > PACKAGES.index(source):
                problems.append(f"{module} imports {target}")
    return sorted(problems)


def test_every_package_of_pipeline_has_its_place_in_the_order() -> None:
    assert {path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py")} == {*PACKAGES, FORMER}


def test_imports_inside_pipeline_point_to_the_foundation() -> None:
    assert against_the_order(graph_of_product()) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert import_cycles(graph_of_product()) == []


def test_no_folder_is_wider_than_the_limit() -> None:
    assert {folder: width for folder, width in folder_widths(ROOT).items() if width > WIDTH_LIMIT} == {}


def test_no_file_is_longer_than_the_limit() -> None:
    assert {name: lines for name, lines in file_lines(ROOT).items() if lines > FILE_LINES_LIMIT} == {}


def test_modules_with_one_importer_and_product_lines_do_not_increase() -> None:
    assert len(single_importers(ROOT, graph_of_product())) <= SINGLE_IMPORTER_BUDGET
    assert sum(file_lines(ROOT).values()) <= LINES_BUDGET


def test_no_module_lies_loose_in_pipeline() -> None:
    assert loose_modules(ROOT) == []


@pytest.mark.parametrize("layer", ["topics", "infra", "pipeline", "workers"])
def test_every_folder_says_in_one_sentence_what_it_is(layer: str) -> None:
    folders = {path.parent for path in (ROOT / layer).rglob("*.py")}
    silent = [str(path) for path in folders if not ast.get_docstring(ast.parse((path / "__init__.py").read_text(encoding="utf-8")))]
    assert silent == []


def test_cycles_widths_and_imports_that_point_up_are_noticed(tmp_path: Path) -> None:
    for name, text in {
        "pipeline/__init__.py": "",
        "pipeline/config/__init__.py": "",
        "pipeline/config/a.py": "def f():\n    from penstock.pipeline.launch import b\n",
        "pipeline/launch/__init__.py": "",
        "pipeline/launch/b.py": "from penstock.pipeline.config.a import f\n",
        "pipeline/inspect/audit/__init__.py": "from penstock.pipeline.config import a\n",
        "topics/m0.py": "import penstock.pipeline.config.a\n",
        **{f"topics/m{number}.py": "" for number in range(1, WIDTH_LIMIT + 1)},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    graph = import_graph(tmp_path)
    assert import_cycles(graph) == [["pipeline.config.a", "pipeline.launch.b"]]
    assert against_the_order(graph) == [
        "pipeline.config.a imports pipeline.launch",
        "pipeline.config.a imports pipeline.launch.b",
        "pipeline.inspect.audit imports pipeline.config",
        "pipeline.inspect.audit imports pipeline.config.a",
    ]
    assert folder_widths(tmp_path)["topics"] == WIDTH_LIMIT + 1
    assert single_importers(tmp_path, graph) == ["pipeline.launch.b"]
    assert file_lines(tmp_path)["pipeline/config/a.py"] == 2


def signals_to_itself(text: str) -> list[int]:
    """The lines on which a program signals its own process or raises an exception in one of its threads."""
    lines = set[int]()
    if not SUSPECT.search(text):
        return []
    for node in ast.walk(ast.parse(text)):
        names = {name.name.rpartition(".")[2] for name in node.names} if isinstance(node, ast.ImportFrom) else _names(node)
        called = {name for inner in ast.walk(node) for name in _names(inner)} if isinstance(node, ast.Call) else set()
        if names & NEVER_CALLED or (called & {"kill", "killpg", "pthread_kill"} and called & {"getpid", "getpgrp", "get_ident"}):
            lines.add(node.lineno)
    return sorted(lines)


def _names(node: ast.AST) -> set[str]:
    return {node.attr} if isinstance(node, ast.Attribute) else {node.id} if isinstance(node, ast.Name) else set()


def test_no_test_signals_the_process_that_runs_it() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != ROOT / "tests" / "support" / "signals.py"]
    assert {str(path): lines for path in files if (lines := signals_to_itself(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "os.kill(os.getpid(), signal.SIGINT)",
        "os.killpg(os.getpgrp(), 2)",
        "threading.Timer(0.2, os.kill, (os.getpid(), 2))",
        "signal.pthread_kill(threading.get_ident(), 2)",
        "signal.raise_signal(2)",
        "from signal import raise_signal as r",
        "_thread.interrupt_main()",
        "ctypes.pythonapi.PyThreadState_SetAsyncExc(1, KeyboardInterrupt)",
        "psutil.Process(os.getpid()).kill()",
    ],
)
def test_a_signal_to_the_own_process_is_noticed(line: str) -> None:
    assert signals_to_itself(f"x = 1\n{line}") == [2]
    assert signals_to_itself("os.kill(child.pid, 9)\nprint(os.getpid())\nchild.kill()") == []


def test_children_of_tests_are_killed_at_the_end_of_their_block() -> None:
    """`with subprocess.Popen(...)` waits without limit for a child that a failed test has left."""
    waiting = []
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        blocks = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.With)] if "Popen" in text else []
        opened = [item.context_expr.func for node in blocks for item in node.items if isinstance(item.context_expr, ast.Call)]
        waiting += [str(path.relative_to(ROOT)) for function in opened if "Popen" in _names(function)]
    assert waiting == ["tests/support/children.py"]


STARTED = """
import os, signal, subprocess, sys
from tests.support.signals import guard_this_process, signal_self
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
for number in SIGNALS:
    signal.signal(number, signal.SIG_IGN)
guard_this_process()
ignored = "import signal; print([n for n in (1, 2, 3) if signal.getsignal(n) is signal.SIG_IGN])"
subprocess.run([sys.executable, "-c", ignored], check=True)
for number in SIGNALS:
    os.kill(os.getpid(), number)
try:
    signal_self(9)
except AssertionError:
    print("refused")
"""


def test_a_suite_that_ignores_signals_starts_children_that_do_not() -> None:
    done = subprocess.run([sys.executable, "-c", STARTED], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert (done.stdout, done.returncode) == ("[]\nrefused\n", 0), done.stderr


if __name__ == "__main__":
    figures = {
        "SINGLE_IMPORTER_BUDGET": (SINGLE_IMPORTER_BUDGET, len(single_importers(ROOT, graph_of_product()))),
        "LINES_BUDGET": (LINES_BUDGET, -(-sum(file_lines(ROOT).values()) // 500) * 500),
    }
    source = Path(__file__).read_text(encoding="utf-8")
    for name, (budget, figure) in figures.items():
        source = re.sub(rf"^{name} = [\d_]+$", f"{name} = {min(budget, figure):_}", source, flags=re.MULTILINE)
    Path(__file__).write_text(source, encoding="utf-8")
