"""Tables and queries of the SQLite database."""
