"""Calling other A2A agents.

``client`` speaks A2A to one agent, and ``answer`` makes events of what it answers. ``pool`` keeps
agents open for ``tool``, the tools of OpenCode's model, which ``mcp`` serves. ``network`` decides
which addresses may be called, and ``proof`` who wrote a card.
"""
