"""A real Apache Kafka broker for one machine, started with nothing but Python: `embedded` starts, stops and finds it."""
