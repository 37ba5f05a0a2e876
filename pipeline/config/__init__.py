"""What a person may set: schema, loading, defaults and plug-ins."""
