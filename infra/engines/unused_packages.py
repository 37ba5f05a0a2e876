"""Keeps transformers and vLLM from importing packages for no other reason than that they are installed.

The rule: both find them missing while they are imported, and go on without; whoever imports such a package later gets it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("scipy", "sklearn")
"""MLflow brings them along. What is imported here needs them for detecting objects, for sound and to draw with a second model."""


@contextmanager
def left_out() -> Iterator[None]:
    """Within the block, these packages cannot be imported, unless they are already: None stands in `sys.modules` for what is not found."""
    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def import_transformers() -> None:
    """Import what opens models, which transformers would otherwise do, with these packages, when the first one is opened."""
    with left_out():
        from transformers import AutoModelForCausalLM  # noqa: F401
