"""Trainer backends behind one protocol: torch and DeepSpeed, in one process or several ranks."""
