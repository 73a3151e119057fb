"""Where a task should run: cost in seconds, policies, and what they were weighing."""
