"""Runs a benchmark: `python -m benchmarks NAME ...`. Without a name, lists them.

A benchmark is a module of this folder that has a function `main`, or a folder of such modules. Its help is its docstring.
"""

import ast
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


def names() -> dict[str, tuple[Path, dict[str, Path]]]:
    """Name -> its file, and the files of its choices if it is a folder."""
    folders = {path.parent.name: path for path in HERE.glob("*/__init__.py")}
    choices = {name: {path.stem: path for path in sorted(HERE.glob(f"{name}/[!_]*.py"))} for name in folders}
    files = {path.stem: path for path in HERE.glob("[!_]*.py")} | folders
    return {name: (files[name], choices.get(name, {})) for name in sorted(files)}


def summary(path: Path) -> str:
    """First line of a module's docstring; the module is not imported."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def refuse(message: str) -> int:
    """Print one line; returns status 2."""
    print(f"benchmarks: {message}", file=sys.stderr)
    return 2


def main(arguments: Sequence[str]) -> int:
    """Run the named benchmark and return its exit status; 2 for an unknown name."""
    known = names()
    name, choice, *_ = [*arguments, "", ""]
    if name in ("", "-h", "--help"):
        width = max(map(len, known)) + 2
        print("\n".join(["usage: python -m benchmarks NAME ...", "", *(f"{each:{width}}{summary(known[each][0])}" for each in known)]))
        return 0
    if name not in known:
        return refuse(f"unknown name {name}; python -m benchmarks lists the names")
    choices = known[name][1]
    if choices and choice in ("", "-h", "--help"):
        print("\n".join(f"{name} {choice:14}{summary(path)}" for choice, path in choices.items()))
        return 0
    if choices and choice not in choices:
        return refuse(f"unknown name {name} {choice}; expected {' or '.join(f'{name} {each}' for each in choices)}")
    words = [name, choice] if choices else [name]
    return importlib.import_module(".".join(["benchmarks", *words])).main(arguments[len(words) :]) or 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what a benchmark has started is stopped, as after Ctrl-C
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.exit(main(sys.argv[1:]))
