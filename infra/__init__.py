"""What the pipeline stands on: the Kafka log, the embedded broker, engines, backends, trackers; knows `topics` and nothing above."""
