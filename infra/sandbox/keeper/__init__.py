"""The process between a child and its parent: it limits the child and ends its remaining processes."""
