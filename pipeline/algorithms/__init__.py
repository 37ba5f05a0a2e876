"""Advantages, losses and importance weights: pure functions of tensors."""
