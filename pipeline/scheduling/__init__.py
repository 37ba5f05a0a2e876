"""Who may draw, train and publish, when, and which group is stale: integers only."""
