"""The MLflow tracking store: runs, points, artifacts."""
