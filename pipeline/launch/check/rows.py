"""Reads every row of a run's data before the run exists: prompts, pools, and the columns that each reward function needs."""

import re
from collections.abc import Callable, Mapping, Sequence

from penstock.pipeline.config.load import Config
from penstock.pipeline.data.open import check
from penstock.pipeline.data.read_files import DataError, Dataset, Row
from penstock.pipeline.data.references import OWN
from penstock.pipeline.data.run_data import Data, pool_of
from penstock.pipeline.data.tokenization import Renderer
from penstock.pipeline.rewards import functions as rewards
from penstock.pipeline.rewards.values import RewardError
from penstock.pipeline.runtime.reporting.log_lines import Progress

OPENING_TAG = re.compile(r"(<(?!assistant|model|bot|s>)[a-z_]+>)\s*\Z")
"""A tag such as `<think>` that a chat template or a prompt opens for the policy; names of roles are none."""
TAG_CHARACTERS = 40
PER_SOURCE = 2
"""First rows of each source that the reward functions are tried on."""
SPREAD = 32
"""Rows at equal distances in the data that they are tried on."""
MOST_KINDS = 8
"""Further rows that they are tried on: each the first of its kind."""
SHOWN_ROWS = 3


class RowReader:
    """Reads all rows of a configuration's data sets; `notify` receives remarks and the progress."""

    def __init__(self, config: Config, *, notify: Callable[[str], None]) -> None:
        """Load the tokenizer and the chat template; no row is read yet."""
        self._config, self._notify, self.renderer = config, notify, Renderer.of(config)
        self._surrogates: dict[str, int] = {}
        """Row -> number of its lone surrogates that were replaced."""
        self.kinds: list[Row] = []
        """Training rows that the reward functions are to be tried on: the first of each source, and one of each further kind."""
        self.spread: list[Row] = []
        """Further training rows to try them on, at equal distances in the data."""
        self._seen: set[object] = set()
        self._noted: set[str] = set()
        self._further, self._read, self._total, self._progress = 0, 0, 0, Progress(notify)

    def read(self, data: Data) -> None:
        """Read the training rows. Raises `DataError` that names the first unusable rows."""
        reward, self._total = self._config.reward, self._total + len(data)
        scoring = rewards.resolve(reward.functions, reward.weights, by_source=self._config.data.rewards)

        def also(row: Row) -> None:
            self._row(row, scoring)
            pool_of(row, self._config)
            self._keep_kind(row)

        data.check(also=also)
        tried = {row.origin for row in self.kinds}
        spread = (data.row(*data.at(number)) for number in range(0, len(data), max(1, len(data) // SPREAD)))
        self.spread = [row for row in spread if row.origin not in tried]

    def read_held_out(self, datasets: Mapping[str, Dataset]) -> None:
        """Read the rows of evaluation. Raises `DataError` as `read` does."""
        reward, self._total = self._config.eval_reward, self._total + sum(map(len, datasets.values()))
        scoring = rewards.resolve(reward.functions, reward.weights)
        for dataset in datasets.values():
            check(dataset, also=lambda row: self._row(row, scoring))

    def _row(self, row: Row, scoring: rewards.Rewards) -> None:
        """Render a row, check its columns for the reward functions, and note what they will not get. Raises `DataError`."""
        if row.replaced:
            self._surrogates[row.origin] = row.replaced
        prompt, _ = self.renderer.render(row)
        if tag := OPENING_TAG.search(prompt[-TAG_CHARACTERS:]):
            self._note(tag[0], f"{row.origin}: the prompt ends with {tag[1]}: completions start after it; reward functions do not get it")
        try:
            scoring.check(row.columns, not_json=row.not_json, answer_field=self._config.data.answer_field)
        except RewardError as error:
            raise DataError(f"{row.origin}: {error}") from error
        for name, what in row.not_json.items():
            self._note(name, f"{row.origin}: the column {name!r} contains {what}, which JSON cannot represent: no reward function gets it")
        own = row.columns.get(OWN)
        replaced = [name for name in own if name in row.columns] if isinstance(own, dict) else []
        for name in (*scoring.facts_named_by(row.columns), *replaced):
            self._note(name, f"{row.origin}: the run has a value of its own for {name!r}: functions find the column in {OWN}[i][{name!r}]")
        self._read += 1
        self._progress(f"checked {self._read:,} of {self._total:,} rows")

    def replaced_warning(self) -> str | None:
        """One line with the number of lone surrogates that were replaced, and the first rows with some; None if there are none."""
        rows, count = list(self._surrogates), sum(self._surrogates.values())
        if not rows:
            return None
        more = f" and {len(rows) - SHOWN_ROWS:,} more rows" if len(rows) > SHOWN_ROWS else ""
        return (
            f"{', '.join(rows[:SHOWN_ROWS])}{more}: {count:,} lone surrogate{'s' if count > 1 else ''} "
            "(halves of characters, as in text truncated by bytes), replaced by U+FFFD"
        )

    def _note(self, name: str, text: str) -> None:
        """Pass a remark to `notify`, unless one with this name was passed before."""
        if name not in self._noted:
            self._noted.add(name)
            self._notify(text)

    def _keep_kind(self, row: Row) -> None:
        """Keep a row to try the reward functions on: the first rows, and the first of each kind."""
        kind = row.prompt is None, frozenset((name, type(value)) for name, value in row.columns.items())
        first = row.index < PER_SOURCE
        if first or (kind not in self._seen and self._further < MOST_KINDS):
            self.kinds.append(row)
            self._further += not first
        self._seen.add(kind)


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
        f"no completion can end: {cause}. Each is truncated at sampling.max_new_tokens = {sampling.max_new_tokens}{masked}: "
        "set eos_token_id in generation_config.json, or sampling.stop"
    )
