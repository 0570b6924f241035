"""HTTP frontend: connections, validation, the journal of requests in flight."""
