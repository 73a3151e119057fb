"""The cost of running a task on a worker, and the policies that choose a worker by it."""
