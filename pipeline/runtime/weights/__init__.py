"""Policy versions through the log: publish, receive, read and retain weights, or share them on one machine."""
