"""Generation with transformers: any causal LM, reproducible bit for bit."""
