"""Pages of a run in a browser: the one file of a report, and `penstock ui` on a run with very many groups beside another run."""
