"""Memory of host and device, streams of work on a device, and thread lanes beside the tasks."""
