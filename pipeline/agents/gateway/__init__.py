"""Endpoint for agents: programs that use the OpenAI API, with one key per trajectory, recorded token by token."""
