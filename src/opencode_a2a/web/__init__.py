"""The HTTP edge: authentication, limits, logs. Pure ASGI."""
