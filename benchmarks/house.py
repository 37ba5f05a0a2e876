"""Structure of the source tree: sizes, folder widths, cycles, upward imports; `--path` lists the files that a sample passes.

tests/test_house.py enforces the limits.
"""

import ast
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.support.command import ROOT, own_broker, parser_of

LAYERS = ("topics", "infra", "pipeline", "workers")
FACADE = "penstock"


def product_files(tree: Path) -> list[Path]:
    """Every Python file of the four layers and the facade; the links in `penstock/` are not followed."""
    paths = [path for layer in (*LAYERS, FACADE) for path in (tree / layer).rglob("*.py")]
    return sorted(path for path in paths if not any(parent.is_symlink() for parent in path.parents))


def file_lines(tree: Path) -> dict[str, int]:
    """Path -> lines of each product file."""
    return {path.relative_to(tree).as_posix(): path.read_text(encoding="utf-8").count("\n") for path in product_files(tree)}


def folder_widths(tree: Path) -> dict[str, int]:
    """Number of Python entries (modules and folders with modules, without `__init__.py`) of each folder of the four layers."""
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
    """Modules of `pipeline/` outside of its folders."""
    return [path.name for path in product_files(tree) if path.parent == tree / "pipeline" and path.name != "__init__.py"]


def module_name(path: Path, tree: Path) -> str:
    """The dotted name of a file without the facade's prefix.

    Example:
        module_name(Path("/t/topics/wire/__init__.py"), Path("/t"))  # -> "topics.wire"
    """
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(tree: Path) -> dict[str, set[str]]:
    """Module -> product modules that it imports anywhere in its text, deferred and typing imports included."""
    modules = {module_name(path, tree): path for path in product_files(tree)}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imported = set(_imported(ast.parse(path.read_text(encoding="utf-8")), package))
        graph[name] = {target for target in imported if target in modules and target != name}
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


def upward_imports(graph: Mapping[str, set[str]]) -> list[str]:
    """Imports of a higher layer."""
    rank = {layer: number for number, layer in enumerate(LAYERS)}
    pairs = [(module, target) for module, targets in graph.items() for target in sorted(targets)]
    ranks = [(rank.get(module.partition(".")[0], len(rank)), rank.get(target.partition(".")[0], -1)) for module, target in pairs]
    return [f"{module} imports {target}" for (module, target), (low, high) in zip(pairs, ranks, strict=True) if high > low]


def single_importers(tree: Path, graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that one other module imports; packages are left out."""
    importers = Counter(target for targets in graph.values() for target in targets)
    names = [module_name(path, tree) for path in product_files(tree) if path.name != "__init__.py"]
    return [name for name in names if importers[name] == 1]


def main(arguments: Sequence[str]) -> None:
    """Print the figures, and with `--path` the files in the order in which the sample passes them."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--path", action="store_true", help="trace a small run through a broker; half a minute")
    chosen = parser.parse_args(arguments)
    lines, widths, graph = file_lines(ROOT), folder_widths(ROOT), import_graph(ROOT)
    longest, widest = max(lines, key=lambda name: lines[name]), max(widths, key=lambda name: widths[name])
    figures: dict[str, object] = {
        "files": len(lines), "lines": sum(lines.values()), "median file, lines": statistics.median(lines.values()),
        "longest file": f"{lines[longest]} {longest}", "widest folder": f"{widths[widest]} {widest}",
        "import cycles": len(import_cycles(graph)), "upward imports": len(upward_imports(graph)),
        "modules with one importer": len(single_importers(ROOT, graph)),
    }  # fmt: skip
    files: dict[str, str] = {}
    if chosen.path:
        from benchmarks.support.sample_path import observe

        with own_broker("path") as (_, broker):
            files = observe(broker.bootstrap)
        figures["files a sample passes"] = len(files)
    if chosen.json:
        print(json.dumps(figures | ({"path": files} if files else {})))
        return
    print("\n".join(f"{name:28}{value}" for name, value in figures.items()))
    print("\n".join(f"{number:>4}  {file:<52} {function}" for number, (file, function) in enumerate(files.items(), start=1)))
