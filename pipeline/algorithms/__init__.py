"""Advantages, losses and importance weights as pure functions."""
