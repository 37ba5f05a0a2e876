"""The feeder: dataset -> `prompts`."""
