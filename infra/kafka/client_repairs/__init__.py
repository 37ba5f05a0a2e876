"""Repairs of faults in kafka-python, and access to its private parts."""
