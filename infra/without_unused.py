"""Has transformers leave out packages that it imports for no other reason than that they are installed.

The rule: it is asked before transformers' models are imported; whoever imports one of these packages later gets it.
"""

import sys

UNUSED = ("scipy", "sklearn")
"""MLflow brings them along; transformers' language models need them neither to train nor to draw, and load them for a CPU-second."""


def leave_out_unused() -> None:
    """Have transformers find, once and for all, that they are not installed; imports transformers, but none of its models."""
    from transformers.utils import is_scipy_available, is_sklearn_available

    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  None stands for: not to be found
    try:
        is_scipy_available(), is_sklearn_available()  # noqa: B018  transformers keeps the answers
    finally:
        for name in hidden:
            del sys.modules[name]
