"""What a run looks like: run view, report, live view, status, tables, metrics, explanations and the HTML page."""
