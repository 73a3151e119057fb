"""Memory of host and device, streams of work on a device, and lanes of threads beside tasks."""
