"""What drains: the stages from outbox to receivers, the hub between them, the writer, the look. Runs in a worker."""
