"""Digest of a user's source file and of the modules in its folder that it imports; none of them is executed."""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path


def digest_of(file: Path, text: bytes) -> str:
    """SHA-256 (hex) of a file's bytes or, if it imports modules of its own folder, of all of them."""
    files = {file: text}
    waiting = [file]
    while waiting:
        for imported in _imported(files[waiting.pop()], file.parent):
            if imported not in files:
                files[imported] = imported.read_bytes()
                waiting.append(imported)
    if len(files) == 1:
        return hashlib.sha256(text).hexdigest()
    lines = sorted(f"{path.relative_to(file.parent)} {hashlib.sha256(content).hexdigest()}" for path, content in files.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _imported(text: bytes, folder: Path) -> Iterator[Path]:
    """The files in a folder that a source may import: a module, or all of a package."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return  # loading it reports the error
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for top in {name.partition(".")[0] for name in names}:
            module, package = folder / f"{top}.py", folder / top
            yield from [module] if module.is_file() else []
            yield from package.rglob("*.py") if (package / "__init__.py").is_file() else ()
