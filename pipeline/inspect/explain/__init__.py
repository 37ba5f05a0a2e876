"""Traces one prompt group through all topics."""
