"""Doing a stage again from the log: training, scoring, drawing."""
