"""Tables and queries, SQLite and PostgreSQL through one implementation."""
