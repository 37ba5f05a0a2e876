"""The policy in training: one optimizer step (micro-batches, forward, backward, update), its repetition from the log, and ranks."""
