"""Packages of engines and backends: those they need, and installed ones that are hidden from libraries that import all they find.

transformers, vLLM and MLflow import every optional dependency. A library finds a hidden package missing while it is imported and continues
without it. Later imports of the package succeed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An installable package."""

    module: str
    """Name to import."""
    name: str
    """Name to install."""
    purpose: str
    extra: str = ""
    """Extra of Penstock's wheel that installs it; empty for a plain dependency."""
    make: str = ""
    """Target of the Makefile that installs it with what fits it; empty if the extra does."""
    on_gpus: bool | None = None
    """True or False for the build of a module for machines with or without GPUs; None if there is only one build."""


UNUSED = ("scipy", "sklearn")
"""Dependencies of MLflow. transformers and vLLM need them only for object detection, audio and speculative decoding."""
MEDIA = ("torchvision", "torchaudio")
"""transformers needs them to preprocess images and sound; a causal language model gets token ids."""


@contextmanager
def left_out(*others: str) -> Iterator[None]:
    """In the block, let imports of `UNUSED` and `others` fail (None in `sys.modules`), unless they are imported already."""
    hidden = [name for name in (*UNUSED, *others) if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def import_transformers() -> None:
    """Import what opens causal language models, while `UNUSED` and `MEDIA` cannot be imported: they take seconds and are not needed."""
    with left_out(*MEDIA):
        from transformers import AutoModelForCausalLM  # noqa: F401
