"""A run outside of Kafka: its topics as Parquet, byte for byte restorable, and questions to both in SQL."""
