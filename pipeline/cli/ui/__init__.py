"""`penstock ui`: runs in a browser, read-only, from this machine alone."""
