"""What the pipeline runs on: the Kafka log, the embedded broker, engines, backends, trackers. Imports `topics` and nothing above."""
