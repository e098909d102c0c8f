"""The composition root: settings become a running service.

Alone in knowing every layer. ``service`` starts and stops the parts in their order, ``process``
runs the service on a socket until a signal, and ``report`` is what the service says about itself.
"""

from opencode_a2a.app.process import serve
from opencode_a2a.app.service import Service, create_app

__all__ = ["Service", "create_app", "serve"]
