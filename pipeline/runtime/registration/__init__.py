"""The registration of runs: their status, who signed their configuration, and which code it names."""
