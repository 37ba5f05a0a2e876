"""Child processes that run users' functions under time limits, with retries."""
