"""Several replicas, several OpenCodes: where a call belongs, and how it gets there.

``fleet`` says which OpenCode a call is about, and ``mailbox`` runs the call here or has the owner
of that OpenCode run it. ``ownership`` decides which OpenCodes this replica owns.
"""
