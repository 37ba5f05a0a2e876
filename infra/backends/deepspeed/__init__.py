"""The backend that trains with DeepSpeed: what a person may tell it, and a reader of its checkpoints."""
