"""Parts of a run against the same work without Penstock: bare loop, contention, trainer, vLLM."""
