"""A backend of several processes: rank 0 sends commands, the others execute them."""
