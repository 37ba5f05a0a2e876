"""The log on Apache Kafka. No other package imports the client library, except `infra/broker` for SCRAM."""
