"""Hides installed packages from libraries that import every optional dependency they find: transformers, vLLM, MLflow.

A library finds a hidden package missing while it is imported and continues without it. Later imports of the package succeed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("scipy", "sklearn")
"""Dependencies of MLflow. transformers and vLLM need them only for object detection, audio and speculative decoding."""
MEDIA = ("torchvision", "torchaudio")
"""transformers needs them to preprocess images and sound; a causal language model gets token ids."""


@contextmanager
def left_out(*others: str) -> Iterator[None]:
    """In the block, `UNUSED` and `others` cannot be imported: None in `sys.modules` hides a package. Packages imported before stay."""
    hidden = [name for name in (*UNUSED, *others) if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def import_transformers() -> None:
    """Import what opens causal language models, which transformers would otherwise do, with `UNUSED` and `MEDIA`, at the first model."""
    with left_out(*MEDIA):
        from transformers import AutoModelForCausalLM  # noqa: F401
