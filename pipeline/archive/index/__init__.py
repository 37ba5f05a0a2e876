"""The index of a run: one row per group and per step, stored in files in the run's folder, so that lists and filters fetch no payloads."""
