"""One optimizer step on several processes: rank 0 assigns micro-batches to the ranks."""
