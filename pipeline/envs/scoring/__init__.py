"""How reward functions are called, what they may return, and what happens if they fail."""
