"""The cluster as a whole: its topics and offsets, and transactions that it has lost the end of."""
