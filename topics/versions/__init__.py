"""How the chunks of a version change another one: which elements are overwritten, or which adapters are merged."""
