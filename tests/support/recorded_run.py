"""What the session's recorded run is: its reward functions, and what a test is given to look into it."""

from dataclasses import dataclass
from typing import Any

from penstock.pipeline.config.run_config import Config

JUDGE = """
def digits(prompts, completions, **columns):
    first = int(prompts[0].split("+")[0])
    if first % 10 == 5:
        raise RuntimeError(f"cannot judge {prompts[0]}")
    if first % 10 == 7:
        return [0.25] * len(completions)
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


def brevity(prompts, completions, **columns):
    first = int(prompts[0].split("+")[0])
    return [None if first % 10 == 7 else 1.0 - len(text) / 16 for text in completions]
"""
"""Of ten prompts one breaks the reward, and one gives every sample the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A finished run to look into; tests read it and write nothing to its topics."""

    run: str
    bootstrap: str
    config: Config
    report: dict[str, Any]
    mlflow_uri: str
