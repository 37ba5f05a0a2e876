"""A user's own functions, by name: `package.module:function` or `path/file.py:function`.

The rule: a user's code comes last. Its folder goes to the end of `sys.path`, and a file whose name means another module loads under a
private one, so a folder of theirs that is called `workers` never replaces ours.
"""

import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from penstock.infra.errors import ConfigError
from penstock.infra.sandbox.own_sources import digest_of


class PluginError(ConfigError):
    """A plug-in that cannot be loaded, in one line that names what is missing and the nearest name."""


def load(spec: str, *, base_dir: str | Path | None = None) -> Callable[..., Any]:
    """The function that `spec` names; relative files are relative to `base_dir`, else to the working directory.

    Example:
        load("math:sqrt")(9)  # -> 3.0

    Raises:
        PluginError: no such file, module or function, or the user's module fails while it is imported.
    """
    where, name = split(spec)
    module = _load_file(spec, _file(where, base_dir)) if where.endswith(".py") else _load_module(spec, where, base_dir)
    target: Any = module
    for part in name.split("."):
        inner = getattr(target, part, None)
        if inner is None:
            functions = [other for other in dir(target) if not other.startswith("_") and callable(getattr(target, other))]
            raise PluginError(f"{spec!r}: {where} has no function {name!r}{nearest(part, functions)}")
        target = inner
    if not callable(target):
        raise PluginError(f"{spec!r}: {name} in {where} is a {type(target).__name__}, not a function")
    return target  # type: ignore[no-any-return]


def split(spec: str) -> tuple[str, str]:
    """The two halves of a spec: module or file, and function. Raises `PluginError` when one is missing."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise PluginError(f"{spec!r} is no plug-in: expected package.module:function or path/file.py:function")
    return where, name


def split_options(spec: str) -> tuple[str, dict[str, Any]]:
    """The text before a question mark, and the options after it: numbers and true/false as such, everything else as text.

    Example:
        split_options("own.py:f?longest=8")  # -> ("own.py:f", {"longest": 8})
    """
    # In a glob `?` matches one character, so only text like name=value after it is taken for options.
    plain, mark, query = spec.partition("?")
    if not mark or not re.match(r"\w+=", query):
        return spec, {}
    return plain, {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}


def source_digest(spec: str, *, base_dir: str | Path | None = None) -> str:
    """SHA-256 (hex) of the source that holds the function, and of the modules in its folder that it imports, before any of it runs.

    Raises:
        PluginError: no such file or module. A module without a source file has the digest of its name.
    """
    where, _ = split(spec)
    if where.endswith(".py"):
        file = _file(where, base_dir)
        return digest_of(file, _read(spec, file))
    _append_to_path(base_dir)
    try:
        module = importlib.util.find_spec(where)
    except (ImportError, ValueError) as error:
        raise PluginError(f"{spec!r}: {one_line(error)}") from error
    if module is None:
        raise _no_module(spec, where)
    if module.origin is None or not module.origin.endswith(".py"):
        return hashlib.sha256(where.encode()).hexdigest()
    return hashlib.sha256(Path(module.origin).read_bytes()).hexdigest()


def short_name(function: str) -> str:
    """The name of a reward function without where it is and its options.

    Example:
        short_name("judge.py:brevity?most=9")  # -> "brevity"
        short_name("http://judge:8000/helpful")  # -> "helpful"
    """
    if is_address(function):
        return urlsplit(function).path.rpartition("/")[2] or urlsplit(function).hostname or function
    return split_options(function)[0].rpartition(":")[2]


def is_address(function: str) -> bool:
    """Whether a reward function is a service's address."""
    return function.startswith(("http://", "https://"))


def nearest(word: str, words: Iterable[str]) -> str:
    """A suggestion to append to an error, or nothing.

    Example:
        nearest("exact_mach", ["exact_match"])  # -> "; did you mean 'exact_match'?"
    """
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _file(where: str, base_dir: str | Path | None) -> Path:
    return (Path(base_dir or ".") / Path(where).expanduser()).resolve()


def _read(spec: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        beside = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise PluginError(f"{spec!r}: there is no file {file}{nearest(file.name, beside)}") from error
    except OSError as error:
        raise PluginError(f"{spec!r}: cannot read {file}: {error.strerror}") from error


class _ThisSource(SourceFileLoader):
    """Runs the source that was read, never cached bytecode: that is taken for fresh when time (in seconds) and size are equal."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.path)


def _load_file(spec: str, file: Path) -> ModuleType:
    source = _read(spec, file)
    # Path and content: two files of one name stay apart, and an edited file is a new module.
    digest = hashlib.sha256(str(file).encode() + b"\0" + source).hexdigest()
    name = f"penstock_plugin_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    _append_to_path(file.parent)
    own_name = _import_name(file) or name
    module_spec = importlib.util.spec_from_file_location(own_name, file, loader=_ThisSource(own_name, str(file), source))
    assert module_spec is not None, f"no loader for {file}"
    assert module_spec.loader is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(module_spec)
    sys.modules |= {name: module, own_name: module}
    try:
        module_spec.loader.exec_module(module)
    # The boundary to a user's module: whatever it raises becomes one line.
    except (Exception, SystemExit) as error:
        for known in {name, own_name}:
            sys.modules.pop(known, None)
        raise PluginError(f"{spec!r} fails while it is imported: {one_line(error)}") from error
    return module


def _import_name(file: Path) -> str | None:
    """The name by which an import finds this file, so that processes which its functions start find them; None if it finds another."""
    try:
        found = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    except (ImportError, ValueError):
        return None
    return file.stem if found is not None and found.origin == str(file) else None


def _load_module(spec: str, where: str, base_dir: str | Path | None) -> ModuleType:
    _append_to_path(base_dir or ".")
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise _no_module(spec, error.name) from error
        raise PluginError(f"{spec!r} fails while it is imported: {one_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"{spec!r} fails while it is imported: {one_line(error)}") from error


def _no_module(spec: str, missing: str) -> PluginError:
    parent, _, last = missing.rpartition(".")
    inside = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    names = [module.name for module in pkgutil.iter_modules(inside)]
    return PluginError(f"{spec!r}: there is no module {missing!r}{nearest(last, names)}")


def _append_to_path(folder: str | Path | None) -> None:
    if folder is not None and (text := str(Path(folder).resolve())) not in sys.path:
        sys.path.append(text)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def one_line(error: BaseException) -> str:
    """What a user's function raised, with the place in its file."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames and not isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
