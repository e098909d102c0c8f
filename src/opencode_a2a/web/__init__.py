"""The HTTP edge: everything that a request passes before A2A reads it. Pure ASGI.

``server`` listens, with ``tls``. ``edge`` puts the layers around the application, in order:
``observe`` logs and counts, ``auth`` authenticates, with ``oidc`` and ``browser``, and ``limits``
bounds.
"""
