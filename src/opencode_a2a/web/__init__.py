"""The edge: who calls, and may they. Pure ASGI."""
