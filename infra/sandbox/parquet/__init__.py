"""Parquet files of others, decoded by a process of its own."""
