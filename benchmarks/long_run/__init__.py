"""Cost of a restart and of `penstock status` after few steps and after many."""
