"""One optimizer step, and everything that repeats one."""
