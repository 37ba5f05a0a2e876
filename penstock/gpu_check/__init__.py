"""`make gpu-check`: Penstock's own code on one GPU, twelve lines of figures with limits; at most ten minutes, no network, no root."""
