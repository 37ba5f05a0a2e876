"""The page of a run: one HTML file of limited size with timeline, curves and samples, built from the log, that needs no network."""
