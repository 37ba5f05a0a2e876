"""Child processes in which users' functions run under a time limit."""
