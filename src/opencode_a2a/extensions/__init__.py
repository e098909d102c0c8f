"""Methods beyond A2A, each declared once."""
