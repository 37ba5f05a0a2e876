"""Data sets with random access to rows, the order of prompts, chat templates and tokenization."""

from penstock.pipeline.data.open import check, open_dataset
from penstock.pipeline.data.rows import DataError, Dataset, Fields, Row
from penstock.pipeline.data.run_data import order

__all__ = ["DataError", "Dataset", "Fields", "Row", "check", "open_dataset", "order"]
