"""Inspection of runs: status, live view, report, HTML page with a timeline, explanations, tables, metrics, audit."""
