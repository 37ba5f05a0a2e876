"""Imports point one way, and looking at the light half of a layer loads no heavy library."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("topics", "infra", "pipeline", "workers")
"""From the bottom up: each may import itself and those before it."""
FACADE = "penstock"
HEAVY = ("torch", "vllm", "deepspeed", "transformers", "mlflow", "datasets", "peft")
TOPICS_MAY_IMPORT = sys.stdlib_module_names | {"topics", "numpy", "pyarrow"}

MODULES = sorted(path.relative_to(ROOT) for layer in (*LAYERS, FACADE) for path in (ROOT / layer).rglob("*.py"))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file names in an import statement, wherever in the file, with its line."""
    package = path.with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            # `from workers import rollout` names workers.rollout.
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def breaches(path: Path) -> list[str]:
    """What a file imports and may not."""
    layer = path.parts[0]
    allowed = {*LAYERS, FACADE} if layer == FACADE else set(LAYERS[: LAYERS.index(layer) + 1])
    found = []
    for module, line in imports_of(path):
        top = module.partition(".")[0]
        if top in {*LAYERS, FACADE} and top not in allowed:
            found.append(f"{path}:{line}: {layer} imports {module}, which is above it")
        if layer == "topics" and top not in TOPICS_MAY_IMPORT:
            found.append(f"{path}:{line}: topics imports {module}")
        if layer == "workers" and top == "workers":
            role, other = path.with_suffix("").parts[1], module.split(".")[1]
            if other != role:
                found.append(f"{path}:{line}: worker {role} imports worker {other}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_imports_only_its_own_layer_and_those_below(path: Path) -> None:
    assert breaches(path) == []


def test_an_import_that_points_up_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for name, text in {
        "topics/a.py": "def f():\n    import pipeline.plan\n",
        "topics/b.py": "import torch\n",
        "workers/c.py": "from workers import d\n",
        "infra/e/f.py": "from topics import record\nfrom . import g\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert breaches(Path("topics/a.py")) == [
        "topics/a.py:2: topics imports pipeline.plan, which is above it",
        "topics/a.py:2: topics imports pipeline.plan",
    ]
    assert breaches(Path("topics/b.py")) == ["topics/b.py:1: topics imports torch"]
    assert breaches(Path("workers/c.py")) == ["workers/c.py:1: worker c imports worker d"]
    assert breaches(Path("infra/e/f.py")) == []


def test_every_package_of_the_four_layers_is_looked_at() -> None:
    assert {path.parts[0] for path in MODULES} >= set(LAYERS)


LIGHT = (
    "topics",
    "infra",
    "pipeline",
    "workers",
    "penstock",
    "pipeline.cli",
    "pipeline.entry",
    "pipeline.launcher",
    "pipeline.runs",
    "pipeline.report",
    "pipeline.inspect",
    "pipeline.doctor",
    "infra.kafka.log",
    "infra.broker.embedded",
    "workers.feeder",
    "workers.scorer",
    "workers.tracker",
)
"""What a machine without torch imports: every package itself, and what feeder, scorer, tracker and the command line begin with."""


def test_the_light_half_imports_no_heavy_library() -> None:
    # The first offender is named: sys.modules is looked at after each import.
    code = f"""
import importlib, sys
for name in {LIGHT!r}:
    importlib.import_module(name)
    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]
    if loaded:
        sys.exit(f"import {{name}} loads {{', '.join(loaded)}}")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
