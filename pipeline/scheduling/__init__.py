"""Who may draw, train and publish, and when: integers only."""
