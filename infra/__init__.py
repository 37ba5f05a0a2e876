"""Foundation of the pipeline: Kafka log, embedded broker, engines, backends, trackers. Imports `topics` and nothing above."""
