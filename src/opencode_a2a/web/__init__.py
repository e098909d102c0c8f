"""The HTTP edge: authentication, limits, streams. Pure ASGI."""
