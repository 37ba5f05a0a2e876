"""Ends completions at stop texts; decodes only the last tokens, so that the cost per token does not grow with the completion."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.errors import EngineError

Ends = Callable[[npt.NDArray[np.int32]], bool]
"""[T] ids so far -> True if the newest one ends the completion."""
MARGIN = 8
"""Decoded tokens before the longest stop text, on which the decoding of its first token depends."""


class Texts:
    """The tokenizer of a model directory, for stop texts."""

    def __init__(self, directory: Path) -> None:
        """Raises `EngineError` if it cannot be read."""
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
        # The library raises plain Exception for a file it cannot read.
        except Exception as error:
            raise EngineError(f"sampling.stop: cannot read the tokenizer {directory / 'tokenizer.json'}: {error}") from error

    def ends(self, stop: Sequence[str]) -> Ends:
        """The test for any of these texts; each token is at least one byte of them."""
        window = max(len(text.encode()) for text in stop) + MARGIN

        def ended(ids: npt.NDArray[np.int32]) -> bool:
            text = self._tokenizer.decode(ids[-window:].tolist(), skip_special_tokens=True)
            return any(stop_text in text for stop_text in stop)

        return ended
