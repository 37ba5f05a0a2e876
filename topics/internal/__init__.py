"""Internal topics of a run: current writers, and a snapshot of the others. Replay reads neither."""
