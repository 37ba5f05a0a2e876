"""Prompts and answers from files, the Hugging Face hub, reasoning-gym, or a user's own function. Rows are read one at a time, by number."""

from pipeline.data.open import check, open_dataset
from pipeline.data.order import order
from pipeline.data.rows import DataError, Dataset, Fields, Row

__all__ = ["DataError", "Dataset", "Fields", "Row", "check", "open_dataset", "order"]
