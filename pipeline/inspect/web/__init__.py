"""The web pages of runs: facts, templates and scripts, which `penstock ui` serves and the one-file report contains."""
