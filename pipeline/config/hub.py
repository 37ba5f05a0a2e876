"""Models on the Hugging Face hub: `hf:ORG/NAME`, optionally with `@` and a branch, tag or commit.

A name is resolved to a commit once, when a run is created; all processes use that commit.
"""

from functools import cache
from pathlib import Path

from penstock.infra.errors import BackendError

SCHEME = "hf:"
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""Files of a model, without copies of the weights in other formats."""


def is_hub_name(path: str) -> bool:
    return path.startswith(SCHEME)


def local_model(path: str) -> Path:
    """The directory of a model; one on the hub is downloaded to the cache if it is missing. Raises `BackendError`."""
    return _snapshot(path) if is_hub_name(path) else Path(path).expanduser()


def pinned(path: str) -> str:
    """Add the current commit to the name of a model on the hub; other paths are unchanged. Raises `BackendError`."""
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
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=FILES))
    # The boundary to a library that reads the network and a cache: its errors have no common type.
    except Exception as error:
        if type(error).__name__.startswith("LocalEntry"):
            here = " `penstock model smollm2 DIR` creates this model offline;" if repository.endswith("/SmolLM2-135M-Instruct") else ""
            fix = f"{here} or run `hf download {repository}` on a machine with network access"
            raise BackendError(f"model.path: {name} is not in the local cache and the hub cannot be reached;{fix}") from error
        reason = " ".join(str(error).split())[:200]
        raise BackendError(
            f"model.path: cannot get {name} from the cache or the hub ({type(error).__name__}: {reason}); "
            f"download it with `hf download {repository}`, or set model.path to a directory"
        ) from error
