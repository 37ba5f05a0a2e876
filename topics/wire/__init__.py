"""Conversion of records to bytes and back: columns, headers, and refusals."""
