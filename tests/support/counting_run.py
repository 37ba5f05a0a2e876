"""A small run over trajectories of several turns."""

from pathlib import Path
from typing import Any

from penstock.pipeline.config.run_config import Config
from tests.support.environments import COUNTING
from tests.support.least_config import merged
from tests.support.worker_set import config_of


def counting_run(model: Path, directory: Path, *, code: str = COUNTING, **sections: Any) -> Config:
    """A run over an environment that counts; `code` is the source of its class."""
    (directory / "counting.py").write_text(code)
    table: dict[str, Any] = {
        "run": {"steps": 2, "seed": 7},
        "environment": {
            "source": f"{directory / 'counting.py'}:Counting?file={directory / 'broken'}",
            "max_turns": 3, "max_tokens": 120, "step_timeout_s": 20.0,
        },
        "reward": {"functions": ["environment"]},
        "schedule": {"prompts_per_step": 2, "samples_per_prompt": 3},
        "algorithm": {"truncated": "train"},
        "rollout": {"workers": 1},
        "trainer": {"micro_batch_tokens": 4096},
    }  # fmt: skip
    return config_of(model, directory, **merged(table, sections))
