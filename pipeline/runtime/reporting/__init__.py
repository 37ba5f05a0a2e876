"""What a worker says of itself: in the log, on its output, over HTTP."""
