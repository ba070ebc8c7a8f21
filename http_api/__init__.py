"""The HTTP API's parts: reading a request strictly, the answers, the problems, the wake behind an order."""
