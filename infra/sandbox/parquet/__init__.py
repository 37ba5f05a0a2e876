"""Decoding of untrusted Parquet files in a process of its own."""
