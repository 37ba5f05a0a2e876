"""One machine: create a run, start, supervise and restart its workers, place them on GPUs."""
