"""Which session, one turn at a time, interrupts. Imports neither A2A nor HTTP."""
