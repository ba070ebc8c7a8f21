"""The same work on Celery, huey and DBOS: `make bench-peers`. Their programs run in a virtual environment apart."""
