"""The trainer: `groups` -> `ledger` and `weights`. Inbox, steps, recovery, checkpoints, publishing."""
