"""The HTTP edge: everything that a request passes before A2A reads it. Pure ASGI.

``socket`` listens, with ``tls``. ``edge`` puts the layers around the application, in order,
and has those that bound a request; ``observe`` logs and counts, and ``auth`` authenticates, with
``oidc`` and ``browser``.
"""
