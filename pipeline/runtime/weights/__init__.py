"""Policy versions through the log: publish, read, prefetch and retain weights, or share them on one machine."""
