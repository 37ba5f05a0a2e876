"""Warnings about the texts of a run: replaced characters, and completions that no token ends."""

from collections.abc import Sequence

from penstock.pipeline.config.run_config import Config
from penstock.pipeline.data import Row
from penstock.pipeline.data.tokenization import Renderer

SHOWN_ROWS = 3


class ReplacedText:
    """Counts the lone surrogates that were replaced in the rows of a run."""

    def __init__(self) -> None:
        self._characters, self._rows = 0, list[str]()

    def seen(self, row: Row) -> Row:
        """The row, counted."""
        if row.replaced:
            self._characters += row.replaced
            self._rows.append(row.origin)
        return row

    def warning(self) -> str | None:
        """One line that names the first rows; None without any."""
        if not self._rows:
            return None
        more = f" and {len(self._rows) - SHOWN_ROWS:,} more rows" if len(self._rows) > SHOWN_ROWS else ""
        return (
            f"{', '.join(self._rows[:SHOWN_ROWS])}{more}: {self._characters:,} lone surrogate{'s' if self._characters > 1 else ''} "
            "(half a character, as text that was cut by bytes has it), replaced by U+FFFD"
        )


def endless_warning(config: Config, stop_ids: Sequence[int], renderer: Renderer) -> str | None:
    """One line if no token ends a completion; None otherwise."""
    sampling = config.sampling
    if sampling.stop or (stop_ids and renderer.ends_turns()):
        return None
    cause = (
        f"the chat template writes none of the model's end tokens (ids {', '.join(map(str, stop_ids))}) after a completion"
        if stop_ids
        else "config.json, generation_config.json and the tokenizer name no eos token"
    )
    masked = ', and with algorithm.truncated = "mask" none is trained' if config.algorithm.truncated == "mask" else ""
    return (
        f"nothing ends a completion: {cause}. Each is cut at sampling.max_new_tokens = {sampling.max_new_tokens}{masked}: "
        "set eos_token_id in generation_config.json, or sampling.stop"
    )
