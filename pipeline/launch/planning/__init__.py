"""Run-time prediction: a simulator of the workers under the live rules, and the search for a split of machines."""
