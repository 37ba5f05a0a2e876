"""The page of a run: one HTML file with its timeline, curves and samples, which opens without any network.

The rule: the page is made from the log alone, in bounded memory, and what does not fit into its size is left out with a note that
says where it is.
"""
