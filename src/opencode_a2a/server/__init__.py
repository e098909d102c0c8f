"""A2A on the wire: requests become commands, task events become bytes."""
