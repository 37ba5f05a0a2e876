"""Weights as byte streams."""
