"""The cluster: its topics and offsets, and transactions whose end it has lost."""
