"""Packed facts about records: numbers, and hashes of compared payloads."""
