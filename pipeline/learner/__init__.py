"""The trainer's policy: optimizer steps, their repetition from the log, published versions and checkpoints."""
