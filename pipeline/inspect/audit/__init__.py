"""`penstock audit`: verifies the promises of a run from its log alone.

It imports only `topics` and reads with another Kafka client, so that it shares no error with the code that it checks.
"""
