"""One module per kind of record that the audit judges."""
