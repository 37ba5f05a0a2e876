"""The DeepSpeed backend: its user options and the reader of its checkpoints."""
