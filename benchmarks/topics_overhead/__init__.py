"""CPU cost of the topics per sample and per group, from small runs to a million groups."""
