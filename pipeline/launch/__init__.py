"""One machine: create a run, start, supervise and restart its workers, assign GPUs to them."""
