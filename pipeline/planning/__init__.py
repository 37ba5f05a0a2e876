"""How long a run would take: a simulator of the workers under the live rules, the search for a split of machines, three papers."""
