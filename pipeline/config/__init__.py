"""Configuration of a run: schema, loading, validation, defaults and plug-ins."""
