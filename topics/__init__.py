"""The records of every topic, their headers and payloads; this layer imports the standard library, numpy and pyarrow only."""
