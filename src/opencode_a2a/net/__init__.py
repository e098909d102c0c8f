"""Outgoing HTTP, without any knowledge of what is called.

``egress`` decides which addresses may be called, ``http`` is a client that obeys it, ``exchange`` a
small and fast client for one server, and ``trust`` has the certificates.
"""
