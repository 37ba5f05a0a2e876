"""Runs outside of Kafka: topics as Parquet files, restorable byte for byte, and SQL over topics and files."""
