"""Commands for this machine: its broker, what it has and lacks, a model to begin with."""
