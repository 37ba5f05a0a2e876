"""Generation with transformers: any causal model, bit for bit repeatable."""
