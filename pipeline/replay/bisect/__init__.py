"""Finds the step, the groups and the cause that spoiled a run, by evaluating its states and replaying steps without groups."""
