"""Single records of a topic, for reading."""
