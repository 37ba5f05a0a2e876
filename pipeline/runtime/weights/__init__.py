"""Weights through the log: how a version is written, read and put together."""
