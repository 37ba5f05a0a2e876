"""The way in for agents: programs in any language that speak the OpenAI API, each under a key of its own, recorded token by token."""
