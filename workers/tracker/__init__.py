"""The tracker: `ledger` and `metrics` -> MLflow."""
