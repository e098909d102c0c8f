"""Turns an OpenCode server into an agent that any A2A client can talk to."""

__version__ = "0.1.0"
