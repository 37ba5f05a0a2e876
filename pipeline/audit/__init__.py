"""`penstock audit`: what a run promises, recomputed from its log alone.

The rule: nothing in here imports any of our code but `topics`, and the log is read by a foreign client, so that the audit shares no
error with what it checks.
"""
