"""What a user reads when something is refused: one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def one_line(kind: type[BaseException], *words: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
    """`pytest.raises` for an error whose message is one line with these words."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    text = str(caught.value)
    assert "\n" not in text and [word for word in words if word not in text] == [], text
