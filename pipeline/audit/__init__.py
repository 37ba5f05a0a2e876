"""`penstock audit`: recomputes from the log alone what a run promises.

The rule: the audit imports none of our code but `topics` and reads the log with another client, so that it shares no
error with what it checks.
"""
