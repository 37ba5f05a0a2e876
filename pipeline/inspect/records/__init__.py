"""Runs, topics and single records as plain data for the user."""
