"""Published figures of RolloutPipe, PipelineRL and RollArt, and the simulator's."""
