"""Child processes in which users' functions run under a time limit with a retry, and what they reach of ours."""
