"""Inspection of runs: run view, report, live view, status, tables, metrics, explanations, and the HTML page."""
