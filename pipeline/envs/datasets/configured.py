"""The data sets that a run's configuration names."""

from penstock.pipeline.config.load import Config
from penstock.pipeline.config.run_config import source_name
from penstock.pipeline.envs.datasets.open import open_dataset
from penstock.pipeline.envs.datasets.rows import Dataset


def open_data(config: Config) -> Dataset:
    """Open the training prompts that the configuration names."""
    data = config.data
    return open_dataset(
        data.source,
        prompt_field=data.prompt_field,
        answer_field=data.answer_field,
        split=data.split,
        start=data.start,
        limit=data.limit,
        size=data.size,
        seed=config.run.seed,
    )


def open_eval_data(config: Config) -> dict[str, Dataset]:
    """Open the held-out prompts, by the name of their source; one that generates them gets another seed."""
    held = config.eval

    def opened(source: str) -> Dataset:
        return open_dataset(
            source,
            prompt_field=config.data.prompt_field,
            answer_field=config.data.answer_field,
            split=held.split,
            start=held.start,
            limit=held.limit,
            size=held.size,
            seed=config.run.seed,
        )

    return {source_name(source): opened(source) for source in config.eval_sources}
