"""Logprobs of a micro-batch under a model: prefix sharing, its attention, and logits in pieces."""
