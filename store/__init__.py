"""The database: tables, and functions that take a Connection and never commit. Knows nothing of Temporal."""
