"""Reading from Kafka: as a member of a group, following partitions, or by offsets."""
