"""Memory and, later, streams of the device a worker computes on."""
