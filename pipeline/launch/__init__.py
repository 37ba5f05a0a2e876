"""One machine: plan, check and create a run; start, supervise and restart its workers, and assign GPUs to them."""
