"""The page of a run: one HTML file with timeline, curves and samples that needs no network.

It is built from the log alone, in bounded memory. A note names what did not fit and where to find it.
"""
