"""Calling other A2A agents.

``client`` speaks A2A to one agent, and ``received`` turns what it sends into events. ``tool``
offers agents to OpenCode's model and keeps them open between calls; ``mcp`` serves it. ``proof``
finds out who wrote a card.
"""
