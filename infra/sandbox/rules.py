"""Rules for child processes that run user code: environment variables, limits, isolation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Isolation = Literal["none", "landlock", "bwrap", "auto"]

REWARD_TOKEN = "PENSTOCK_REWARD_TOKEN"
"""Environment variable with the token sent to a reward service as `Authorization: Bearer …`."""
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASS", "PWD", "CREDENTIAL", "AUTH", "SECURITY")
_LISTED = """
PATH HOME USER LOGNAME SHELL PWD LANG LANGUAGE LC_* TZ TERM COLUMNS TMPDIR TEMP TMP XDG_* LD_LIBRARY_PATH LD_PRELOAD
PYTHON* VIRTUAL_ENV CONDA_* COVERAGE_* JAVA_* PENSTOCK_HOME PENSTOCK_DEBUG
OMP_* GOMP_* KMP_* MKL_* OPENBLAS_* NUMEXPR_* NUMBA_* MALLOC_* CUDA_* CUBLAS_* CUDNN_* NVIDIA_* NCCL_* GLOO_* HIP_* ROCR_*
TORCH_* PYTORCH_* TORCHINDUCTOR_* TRITON_* VLLM_* DS_* HF_* HUGGINGFACE_* TRANSFORMERS_* TOKENIZERS_PARALLELISM
HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY http_proxy https_proxy no_proxy all_proxy
SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
"""
NAMES = frozenset(name for name in _LISTED.split() if not name.endswith("*"))
"""Names of variables that children get."""
STARTS = tuple(name.removesuffix("*") for name in _LISTED.split() if name.endswith("*"))
"""Prefixes of further variables that children get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRules:
    """Rules for the children of one section of the configuration."""

    section: str
    """Table of the configuration with these keys, for messages."""
    pass_env: tuple[str, ...] = ()
    """Names of further environment variables that children get."""
    memory_gb: float | None = None
    """Of one child with everything it started; half of the machine's memory if None."""
    max_processes: int = 512
    """Of one child with everything it started."""
    file_gb: float = 64.0
    """Of one file."""
    isolate: Isolation | None = None
    """None: "landlock" for an ordinary user, "none" for root."""
    isolate_network: bool = False
    """Children have no network; needs bwrap."""


REWARD, ENVIRONMENT = ChildRules(section="reward"), ChildRules(section="environment")
"""Rules of a configuration without such keys."""


def child_environment(environ: Mapping[str, str], pass_env: Sequence[str] = ()) -> dict[str, str]:
    """The environment variables that a child gets: listed ones, those whose value is a path, and those named in `pass_env`.

    A name that contains one of `SECRET_WORDS` is only passed if it is on the list or in `pass_env`.

    Example:
        child_environment({"PATH": "/bin", "HF_HOME": "/hf", "HF_TOKEN": "x", "DB": "postgres://me:x@db"})  # -> PATH and HF_HOME
    """
    return {name: value for name, value in environ.items() if name in pass_env or _is_public(name, value)}


def _is_public(name: str, value: str) -> bool:
    if "://" in value and "@" in value:  # a password in an address, as of a proxy
        return False
    if name in NAMES:
        return True
    if any(word in name.upper() for word in SECRET_WORDS):
        return False
    return name.startswith(STARTS) or _is_path(value)


def _is_path(value: str) -> bool:
    """True for an absolute path that exists or whose folder does: a secret may start with a slash too."""
    if not value.startswith("/") or len(value) > 4096:
        return False
    path = Path(value)
    try:
        return path.exists() or (path.parent != Path("/") and path.parent.is_dir())
    except (OSError, ValueError):
        return False
