"""Workflows, one a file. They decide and wait; activities do. Nothing here touches the store."""
