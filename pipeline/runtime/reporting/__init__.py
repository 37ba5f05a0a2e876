"""Worker telemetry: status records, log lines, health endpoint."""
