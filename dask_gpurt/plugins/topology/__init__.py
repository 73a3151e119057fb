"""The scheduler's and the workers' knowledge of their machines."""
