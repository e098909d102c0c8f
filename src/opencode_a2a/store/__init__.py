"""The database: engines, tables and queries.

``Database`` (``database.py``) runs functions of a connection in threads. ``engine.py`` says what a
database has to do for that, ``sqlite.py`` and ``postgres.py`` do it, and ``schema.py`` has the
tables. Every other module holds the queries of one subject: functions that take a connection.

They run SQL in one of three ways:

- ``Prepared`` (``database.py``) for what runs with each message, batch of entries or look at the
  database: text, compiled once, run by the driver itself;
- SQLAlchemy's expressions for everything else: queries that depend on their arguments, and those
  that run seldom;
- ``sa.text`` and ``exec_driver_sql`` for SQL of PostgreSQL alone that runs seldom.
"""
