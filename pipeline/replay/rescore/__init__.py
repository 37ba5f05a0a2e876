"""Score recorded samples again, with the same or other reward functions."""
