"""Calling other A2A agents."""
