"""One optimizer step on several processes: rank 0 hands out micro-batches, the others train them."""
