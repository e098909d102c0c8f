"""The A2A wire, in both directions and both versions; no I/O."""
