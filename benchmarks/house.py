"""How the source tree is built, in figures: widest folder, import cycles, complexity, sizes. Compares two revisions with `--against`.

Example:
    python benchmarks/house.py --against 1b174d2
"""

import argparse
import ast
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("topics", "infra", "pipeline", "workers")
FACADE = "penstock"
COMPLEXITY_LIMIT = 12
WIDTH_LIMIT = 14
LINES_LIMIT = 31_000
PATH_LIMIT = 45
REPLACES_PRIVATE_PARTS = (
    "infra/kafka/client_repairs/*.py",
    "infra/kafka/patches.py",
    "infra/kafka/internals.py",
    "infra/kafka/wire.py",
    "infra/kafka/loop.py",
    "infra/engines/vllm/cpu_repack.py",
    "infra/engines/vllm/draws.py",
    "infra/engines/vllm_repack.py",
    "infra/engines/vllm_draws.py",
)
"""Files that stand in for code inside kafka-python and vLLM, under their present and their former names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one tree; counts, except where a field says otherwise."""

    widest_folder: int
    widest_folder_name: str
    loose_modules: int
    """Modules of `pipeline/` that lie in none of its folders."""
    import_cycles: int
    complex_functions: int
    """Functions whose cyclomatic complexity (McCabe, as ruff counts it) is above 12."""
    product_files: int
    product_lines: int
    private_lines: int
    """Lines that replace private parts of a dependency."""
    median_file_lines: float
    p90_function_lines: int


def product_files(tree: Path) -> list[Path]:
    """Every Python file of the four layers and the facade; the links in `penstock/` are not followed."""
    paths = [path for layer in (*LAYERS, FACADE) for path in (tree / layer).rglob("*.py")]
    return sorted(path for path in paths if not any(parent.is_symlink() for parent in path.parents))


def lines_of(path: Path) -> int:
    """Number of lines of a text file."""
    return path.read_text(encoding="utf-8").count("\n")


def folder_widths(tree: Path) -> dict[str, int]:
    """Number of Python entries (modules and folders with modules, `__init__.py` apart) of each folder of the four layers."""
    entries = defaultdict[str, set[str]](set)
    for path in product_files(tree):
        parts = path.relative_to(tree).parts
        if parts[0] == FACADE:
            continue
        for depth in range(1, len(parts)):
            if parts[depth] != "__init__.py":
                entries["/".join(parts[:depth])].add(parts[depth])
    return {folder: len(names) for folder, names in entries.items()}


def loose_modules(tree: Path) -> list[str]:
    """Modules of `pipeline/` that lie in none of its folders."""
    return [path.name for path in product_files(tree) if path.parent == tree / "pipeline" and path.name != "__init__.py"]


def module_name(path: Path, tree: Path) -> str:
    """The dotted name of a file without the facade's prefix.

    Example:
        module_name(Path("/t/topics/wire/__init__.py"), Path("/t"))  # -> "topics.wire"
    """
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(tree: Path) -> dict[str, set[str]]:
    """Module -> modules of ours that it imports anywhere in its text, deferred and typing imports included."""
    modules = {module_name(path, tree): path for path in product_files(tree)}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        named = set(_imported(ast.parse(path.read_text(encoding="utf-8")), package))
        graph[name] = {target for target in named if target in modules and target != name}
    return graph


def _imported(module: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (_without_facade(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = _without_facade(".".join([*parents, *filter(None, [node.module])]))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _without_facade(name: str) -> str:
    inner = name.removeprefix(f"{FACADE}.")
    return inner if inner.partition(".")[0] in LAYERS else name


def import_cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of modules that reach each other, by Tarjan's algorithm; each sorted by name."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                cycles.append(sorted(members))

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 4 * len(graph) + 100))
    for name in graph:
        if name not in index:
            visit(name)
    return sorted(cycles)


def complex_functions(tree: Path) -> list[str]:
    """`file:line name` of each function above the limit of complexity, as ruff counts it."""
    limit = f"lint.mccabe.max-complexity={COMPLEXITY_LIMIT}"
    folders = [str(tree / layer) for layer in (*LAYERS, FACADE) if (tree / layer).exists()]
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--output-format", "json"]
    command = [*ruff, "--select", "C901", "--config", limit, *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"house: ruff failed: {done.stderr.strip()}")
    return [
        f"{Path(problem['filename']).relative_to(tree)}:{problem['location']['row']} {problem['message']}"
        for problem in json.loads(done.stdout)
    ]


def function_lengths(tree: Path) -> list[int]:
    """Lines of every function and method."""
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in product_files(tree)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def measure(tree: Path) -> Figures:
    """The figures of a source tree."""
    files = product_files(tree)
    widths = folder_widths(tree)
    widest = max(widths, key=lambda name: widths[name])
    private = {path for pattern in REPLACES_PRIVATE_PARTS for path in tree.glob(pattern) if path.name != "__init__.py"}
    return Figures(
        widest_folder=widths[widest],
        widest_folder_name=widest,
        loose_modules=len(loose_modules(tree)),
        import_cycles=len(import_cycles(import_graph(tree))),
        complex_functions=len(complex_functions(tree)),
        product_files=len(files),
        product_lines=sum(map(lines_of, files)),
        private_lines=sum(map(lines_of, private)),
        median_file_lines=statistics.median(lines_of(path) for path in files if path.name != "__init__.py"),
        p90_function_lines=round(statistics.quantiles(function_lengths(tree), n=10)[-1]),
    )


def at_revision(revision: str, into: Path) -> Path:
    """The product's folders as git has them at `revision`, unpacked under `into`."""
    done = subprocess.run(["git", "archive", revision, *LAYERS, FACADE], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"house: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(into, filter="tar")
    return into


def _run_sample_path() -> str:
    script = Path(__file__).with_name("sample_path.py")
    return subprocess.run(
        [sys.executable, str(script), "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()[-1]


LABELS = {
    "widest_folder": f"entries of the widest folder (limit {WIDTH_LIMIT})",
    "widest_folder_name": "the widest folder",
    "loose_modules": "loose modules in pipeline/ (limit 0)",
    "import_cycles": "import cycles (limit 0)",
    "complex_functions": f"functions above complexity {COMPLEXITY_LIMIT} (limit 0)",
    "product_files": "product files",
    "product_lines": f"product lines (limit {LINES_LIMIT:,})",
    "private_lines": "lines that replace a dependency's private parts",
    "median_file_lines": "median file, lines",
    "p90_function_lines": "function at the 90th percentile, lines",
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", metavar="REVISION", help="a git revision to compare with")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--path", action="store_true", help="also the files a sample passes, from a run of half a minute")
    parser.add_argument("--list", action="store_true", help="name the cycles and the complex functions of this tree")
    chosen = parser.parse_args()
    columns = {"now": asdict(measure(ROOT))}
    if chosen.against:
        with tempfile.TemporaryDirectory() as folder:
            columns = {chosen.against: asdict(measure(at_revision(chosen.against, Path(folder)))), **columns}
    path = json.loads(_run_sample_path()) if chosen.path else {}
    if chosen.json:
        print(json.dumps(columns | ({"sample_path": path} if path else {})))
        return
    print(f"{'':<52}" + "".join(f"{name[:14]:>16}" for name in columns))
    for field, label in LABELS.items():
        print(f"{label:<52}" + "".join(f"{figures[field]:>16}" for figures in columns.values()))
    if path:
        print(
            f"{f'files a sample passes (limit {PATH_LIMIT})':<52}"
            + "".join(f"{'' if name != 'now' else len(path):>16}" for name in columns)
        )
        print("\n".join(f"    {file:<52} {function}" for file, function in path.items()))
    if chosen.list:
        print("\n".join(["", *(" <-> ".join(cycle) for cycle in import_cycles(import_graph(ROOT))), *complex_functions(ROOT)]))


if __name__ == "__main__":
    main()
