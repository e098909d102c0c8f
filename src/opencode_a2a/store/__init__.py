"""The database: engines, tables and queries."""
