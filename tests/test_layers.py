"""Imports point one way, and looking at the light half of a layer loads no heavy library."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("topics", "infra", "pipeline", "workers")
"""From the bottom up: each may import itself and those before it. They are imported as `penstock.<layer>`."""
FACADE = "penstock"
HEAVY = ("torch", "vllm", "deepspeed", "transformers", "mlflow", "datasets", "peft")
SHARED_BY_ROLES = frozenset({("environment", "rollout"), ("rollout", "evaluator")})
"""(importer, imported): environment and rollout workers keep the same groups; a rollout worker can share its engine with an evaluation."""
TOPICS_MAY_IMPORT = sys.stdlib_module_names | {"penstock", "numpy", "pyarrow"}

MODULES = sorted(path.relative_to(ROOT) for layer in (*LAYERS, FACADE) for path in (ROOT / layer).rglob("*.py"))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file names in an import statement, wherever in the file, with its line."""
    package = path.parts[:-1] if path.parts[0] == FACADE else (FACADE, *path.parts[:-1])
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            # `from workers import rollout` names penstock.workers.rollout.
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def layer_of(module: str) -> str | None:
    """The layer, or the facade, that a dotted name belongs to; None for a stranger.

    Example:
        layer_of("penstock.topics.rollouts")  # -> "topics"
        layer_of("penstock.opened")  # -> "penstock"
    """
    top, _, rest = module.partition(".")
    inner = rest.partition(".")[0]
    return None if top != FACADE else inner if inner in LAYERS else FACADE


def breaches(path: Path) -> list[str]:
    """What a file imports and may not."""
    layer = path.parts[0]
    allowed = {*LAYERS, FACADE} if layer == FACADE else set(LAYERS[: LAYERS.index(layer) + 1])
    found = []
    for module, line in imports_of(path):
        top, named = module.partition(".")[0], layer_of(module)
        if top in LAYERS:
            found.append(f"{path}:{line}: {module} is imported as penstock.{module}")
        if named is not None and named not in allowed:
            found.append(f"{path}:{line}: {layer} imports {module}, which is above it")
        if layer == "topics" and top not in TOPICS_MAY_IMPORT:
            found.append(f"{path}:{line}: topics imports {module}")
        if layer == named == "workers" and len(path.parts) > 2:
            roles = (path.parts[1], module.split(".")[2])
            if roles[0] != roles[1] and roles not in SHARED_BY_ROLES:
                found.append(f"{path}:{line}: worker {roles[0]} imports worker {roles[1]}")
    return found


def test_a_module_imports_only_its_own_layer_and_those_below() -> None:
    assert [breach for path in MODULES for breach in breaches(path)] == []


def test_an_import_that_points_up_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for name, text in {
        "topics/a.py": "def f():\n    import penstock.pipeline.scheduling\n",
        "topics/b.py": "import torch\n",
        "workers/c/worker.py": "from penstock.workers.d import worker\n",
        "infra/e/f.py": "from penstock.topics import rollouts\nfrom . import g\n",
        "infra/h.py": "from topics import rollouts\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert breaches(Path("topics/a.py")) == ["topics/a.py:2: topics imports penstock.pipeline.scheduling, which is above it"]
    assert breaches(Path("topics/b.py")) == ["topics/b.py:1: topics imports torch"]
    assert breaches(Path("workers/c/worker.py")) == ["workers/c/worker.py:1: worker c imports worker d"]
    assert breaches(Path("infra/e/f.py")) == []
    assert breaches(Path("infra/h.py")) == ["infra/h.py:1: topics.rollouts is imported as penstock.topics.rollouts"]


def test_every_package_of_the_four_layers_is_looked_at() -> None:
    assert {path.parts[0] for path in MODULES} >= set(LAYERS)


LIGHT = (
    "penstock.topics",
    "penstock.infra",
    "penstock.pipeline",
    "penstock.workers",
    "penstock",
    "penstock.pipeline.cli",
    "penstock.pipeline.runtime.main",
    "penstock.pipeline.launch.launcher",
    "penstock.pipeline.runtime.registration.run_registry",
    "penstock.pipeline.inspect.report.summary",
    "penstock.pipeline.inspect.records.browse",
    "penstock.pipeline.launch.doctor",
    "penstock.infra.kafka.log",
    "penstock.infra.broker.embedded",
    "penstock.workers.feeder.worker",
    "penstock.workers.scorer.worker",
    "penstock.workers.tracker.worker",
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
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr


OPTIONAL = (
    "websockets", "starlette", "uvicorn", "gymnasium", "textarena", "mlflow", "datasets", "reasoning_gym", "duckdb", "simpy", "matplotlib",
    "wandb", "httpx", "mpmath", "deepspeed", "peft",
)  # fmt: skip
"""Packages of extras that a run of `examples/demo.toml` does not use."""


def test_a_run_needs_no_package_of_an_extra_that_it_does_not_use() -> None:
    code = f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for role in ("feeder", "scorer", "trainer", "rollout", "evaluator", "environment"):
    importlib.import_module(f"penstock.workers.{{role}}.worker")
importlib.import_module("penstock.pipeline.launch.launcher")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
