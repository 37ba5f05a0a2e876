"""`make gpu-check`: Penstock's own code on one GPU, thirteen measurements with limits; at most ten minutes, no network, no root."""
