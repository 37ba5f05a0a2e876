"""Conversations with a policy as token ids: the generated ids are trained as they are, never rendered again."""
