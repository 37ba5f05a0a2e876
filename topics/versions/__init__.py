"""Encodings of a version's chunks that change another version: replaced elements, or merged adapters."""
