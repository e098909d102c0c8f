"""Turns an OpenCode server into an agent that any A2A client can talk to."""

__version__ = "2.0.0"
