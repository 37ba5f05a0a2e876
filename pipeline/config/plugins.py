"""Loads users' functions by name: `package.module:function` or `path/file.py:function`.

A user's folder is appended to `sys.path`, and a file with the name of another module is loaded under a private name, so that users' files
never replace ours.
"""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from penstock.infra.errors import ConfigError


class PluginError(ConfigError):
    """A user's function cannot be loaded; one line with the missing name and the nearest one."""


def load(spec: str, *, base_dir: str | Path | None = None) -> Callable[..., Any]:
    """Load the function `spec`; relative files are relative to `base_dir`, else to the working directory.

    Raises `PluginError`: the file, module or function is missing, or importing the user's module fails.
    """
    origin, name = split(spec)
    module = _load_file(spec, _file(origin, base_dir)) if origin.endswith(".py") else _load_module(spec, origin, base_dir)
    target: Any = module
    for part in name.split("."):
        inner = getattr(target, part, None)
        if inner is None:
            functions = [other for other in dir(target) if not other.startswith("_") and callable(getattr(target, other))]
            raise PluginError(f"{spec!r}: {origin} has no function {name!r}{nearest(part, functions)}")
        target = inner
    if not callable(target):
        raise PluginError(f"{spec!r}: {name} in {origin} is a {type(target).__name__}, not a function")
    return target  # type: ignore[no-any-return]


def split(spec: str) -> tuple[str, str]:
    """Split a spec into module or file, and function. Raises `PluginError` if either is missing."""
    origin, colon, name = spec.rpartition(":")
    if not colon or not origin or not name:
        raise PluginError(f"{spec!r} does not name a function: expected package.module:function or path/file.py:function")
    return origin, name


def split_options(spec: str) -> tuple[str, dict[str, Any]]:
    """The text before a question mark, and the options after it: numbers, true and false are converted, other values are text.

    Example:
        split_options("own.py:f?longest=8")  # -> ("own.py:f", {"longest": 8})
    """
    # In a glob `?` matches one character, so options are recognised only by name=value.
    plain, mark, query = spec.partition("?")
    if not mark or not re.match(r"\w+=", query):
        return spec, {}
    return plain, {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}


def source_digest(spec: str, *, base_dir: str | Path | None = None) -> str:
    """SHA-256 (hex) of the function's source file and of the modules in its folder that it imports; nothing is executed.

    A module without a source file has the digest of its name. Raises `PluginError` if the file or module is missing.
    """
    origin, _ = split(spec)
    if origin.endswith(".py"):
        file = _file(origin, base_dir)
        return digest_of_sources(file, _read(spec, file))
    _append_to_path(base_dir)
    try:
        module = importlib.util.find_spec(origin)
    except (ImportError, ValueError) as error:
        raise PluginError(f"{spec!r}: {one_line(error)}") from error
    if module is None:
        raise _no_module(spec, origin)
    if module.origin is None or not module.origin.endswith(".py"):
        return hashlib.sha256(origin.encode()).hexdigest()
    return hashlib.sha256(Path(module.origin).read_bytes()).hexdigest()


def short_name(function: str) -> str:
    """The name of a reward function without its file, module or host and its options.

    Example:
        short_name("rewards.py:brevity?most=9")  # -> "brevity"
        short_name("http://scores:8000/helpful")  # -> "helpful"
    """
    if is_address(function):
        return urlsplit(function).path.rpartition("/")[2] or urlsplit(function).hostname or function
    return split_options(function)[0].rpartition(":")[2]


def is_address(function: str) -> bool:
    """True if a reward function is the address of a service."""
    return function.startswith(("http://", "https://"))


def nearest(word: str, words: Iterable[str]) -> str:
    """Text that suggests the most similar word, to append to an error; empty if none is similar."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.65)
    return f"; did you mean {close[0]!r}?" if close else ""


def _file(path: str, base_dir: str | Path | None) -> Path:
    return (Path(base_dir or ".") / Path(path).expanduser()).resolve()


def _read(spec: str, file: Path) -> bytes:
    """Read a plugin's source file. Raises `PluginError` with the name `spec`."""
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        neighbours = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise PluginError(f"{spec!r}: the file {file} does not exist{nearest(file.name, neighbours)}") from error
    except OSError as error:
        raise PluginError(f"{spec!r}: cannot read {file}: {error.strerror}") from error


class _ThisSource(SourceFileLoader):
    """Executes source that was read before, never cached bytecode, which Python matches by time (in seconds) and size only."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.path)


def _load_file(spec: str, file: Path) -> ModuleType:
    """Import a plugin file, once for each path and content. Raises `PluginError` if it is missing, or raises an error itself."""
    source = _read(spec, file)
    # Path and content: files of equal names are different modules, and an edited file is a new module.
    digest = hashlib.sha256(str(file).encode() + b"\0" + source).hexdigest()
    name = f"penstock_plugin_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    _append_to_path(file.parent)
    own_name = _import_name(file) or name
    module_spec = importlib.util.spec_from_file_location(own_name, file, loader=_ThisSource(own_name, str(file), source))
    assert module_spec is not None and module_spec.loader is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(module_spec)
    sys.modules |= {name: module, own_name: module}
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        for loaded in {name, own_name}:
            sys.modules.pop(loaded, None)
        raise PluginError(f"{spec!r} fails while it is imported: {one_line(error)}") from error
    return module


def _import_name(file: Path) -> str | None:
    """The name under which a file can be imported, as processes started by its functions need; None if that is another file."""
    try:
        module_spec = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    except (ImportError, ValueError):
        return None
    return file.stem if module_spec is not None and module_spec.origin == str(file) else None


def _load_module(spec: str, module: str, base_dir: str | Path | None) -> ModuleType:
    """Import the module of a plugin. Raises `PluginError` if it is missing, or raises an error itself."""
    _append_to_path(base_dir or ".")
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (module == missing or module.startswith(f"{missing}.")):
            raise _no_module(spec, missing) from error
        raise PluginError(f"{spec!r} fails while it is imported: {one_line(error)}") from error


def _no_module(spec: str, missing: str) -> PluginError:
    """The error about a module that does not exist, with the nearest name."""
    parent, _, last = missing.rpartition(".")
    inside = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    names = [module.name for module in pkgutil.iter_modules(inside)]
    return PluginError(f"{spec!r}: there is no Python module {missing!r}{nearest(last, names)}")


def _append_to_path(folder: str | Path | None) -> None:
    if folder is not None and (text := str(Path(folder).resolve())) not in sys.path:
        sys.path.append(text)


def _value(text: str) -> Any:
    """The number, true or false that an option's text means; otherwise the text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def one_line(error: BaseException) -> str:
    """An exception of a user's function in one line, with file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames and not isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{location}"


def digest_of_sources(file: Path, text: bytes) -> str:
    """SHA-256 (hex) of a plugin file or, if it imports from its own folder, of the sorted paths and digests of all files reached.

    Executes none of them.
    """
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
