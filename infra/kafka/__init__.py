"""The log on Apache Kafka: `KafkaLog` and its parts; only this package knows the client library."""
