"""Log-probabilities of a micro-batch under a model: which tokens are computed, how they attend, and logits a piece at a time."""
