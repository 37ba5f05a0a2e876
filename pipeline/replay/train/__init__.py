"""Recomputes recorded optimizer steps, exactly or with other settings."""
