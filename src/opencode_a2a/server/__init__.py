"""A2A served: operations, bindings, cards and contracts.

The way of a request, which ``web`` has authenticated and bounded:

1. ``jsonrpc`` or ``rest``, the bindings, find the operation and the version of A2A, and decode the
   body. What both take from a request and give to a response is in ``http``.
2. ``a2a.encoding.Encoding.read`` checks the params and makes the operation's type of them, the same
   for all versions.
3. ``operations`` runs the operation: ``HANDLERS`` names a method of ``Operations`` for each. One
   that sends a message reads its parts and metadata with ``content`` and submits it to ``tasks``.
4. The result is an object of A2A 1.0, which the binding encodes for the version of the request, or
   a ``TaskStream``, whose ``next`` returns encoded events. ``http.event_stream`` and ``sse`` write
   these as server-sent events.

An error is a ``ServiceError`` wherever it is raised; the binding encodes it. A method beyond A2A
leaves step 1 of JSON-RPC for ``extensions.dispatch``.
"""
