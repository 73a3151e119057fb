"""The runtime's page on the scheduler's dashboard: gathering, shaping, drawing."""
