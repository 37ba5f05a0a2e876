"""Models by their name on the Hugging Face hub: `hf:ORG/NAME`, with a branch, tag or commit behind an `@`.

The rule: a name is resolved to a commit once, when a run is created; from then on every process asks for that commit.
"""

from functools import cache
from pathlib import Path

from penstock.infra.errors import BackendError

SCHEME = "hf:"
WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""Files of a model; not the same weights in other formats."""


def is_hub_name(path: str) -> bool:
    """Whether a model is named as on the hub."""
    return path.startswith(SCHEME)


def local_model(path: str) -> Path:
    """The directory of a model: a path as it is, a name of the hub in the cache, fetched if need be. Raises `BackendError`."""
    return _snapshot(path) if is_hub_name(path) else Path(path).expanduser()


def pinned(path: str) -> str:
    """A name of the hub by its commit; anything else as it is. Raises `BackendError`.

    Example:
        pinned("hf:org/model@main")  # -> "hf:org/model@9c1f0a…"
    """
    if not is_hub_name(path):
        return path
    return f"{path.partition('@')[0]}@{_snapshot(path).name}"


@cache
def _snapshot(name: str) -> Path:
    repository, _, revision = name.removeprefix(SCHEME).partition("@")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise BackendError(f"model.path: {name} needs the package huggingface_hub: pip install '.[trainer]' in the checkout") from error
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=WANTED))
    # The boundary to a library that reads the network and a cache: its errors have no common type.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise BackendError(
            f"model.path: cannot get {name} from the cache or the hub ({type(error).__name__}: {reason}); "
            f"fetch it with `hf download {repository}`, or give a directory"
        ) from error
