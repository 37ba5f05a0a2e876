"""The settings of three papers in the simulator, their published figures beside the simulated ones."""
