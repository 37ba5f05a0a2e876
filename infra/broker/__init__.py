"""An Apache Kafka broker for one machine, installed and started from Python: `embedded` starts, stops and locates it."""
