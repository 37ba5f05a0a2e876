"""Data sets with random access to rows, the prompts of a run, chat templates and tokenization."""

from penstock.pipeline.data.files import DataError, Dataset, Fields, Row
from penstock.pipeline.data.open import check, open_dataset

__all__ = ["DataError", "Dataset", "Fields", "Row", "check", "open_dataset"]
