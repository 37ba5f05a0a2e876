"""Checks of the audit, one module for each kind of record."""
