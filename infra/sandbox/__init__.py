"""Child processes in which users' functions and programs run under a time limit, and what they reach of ours."""
