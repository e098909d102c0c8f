"""The composition root: settings become a running service. Alone in knowing every layer.

To be read in this order: ``process`` runs the service on a socket until a signal, ``service``
starts and stops everything, ``parts`` is what does the work, ``routes`` what answers requests, and
``report`` what the service says about itself.
"""

from opencode_a2a.app.process import serve as serve
from opencode_a2a.app.service import Service as Service
