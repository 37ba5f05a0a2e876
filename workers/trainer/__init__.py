"""The trainer: `groups` -> `ledger` and `weights`."""
