"""The page of a run: one HTML file with timeline, curves and samples that needs no network.

It is made from the log alone, in bounded memory. A note says where to find what did not fit.
"""
