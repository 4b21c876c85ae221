"""I/O with the API server: requests, watches with their cache, the queue, the Lease."""
