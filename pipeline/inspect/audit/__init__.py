"""`penstock audit`: recomputes from the log alone what a run promises.

It imports `topics` only and reads with another Kafka client, so that it shares no error with what it checks.
"""
