"""Published figures of RolloutPipe, PipelineRL and RollArt against the simulator's."""
