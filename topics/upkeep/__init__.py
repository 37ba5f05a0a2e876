"""Topics that keep a run going and that nothing is repeated from: who writes, and what the others add up to."""
