"""The report of a run as plain data and as text, the model card, and the provenance statement."""
