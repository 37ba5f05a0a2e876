"""A run's measurements as points, and where they are sent."""
