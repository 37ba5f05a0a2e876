"""The backend that trains with DeepSpeed, and what a person may tell it."""
