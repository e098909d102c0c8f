"""Turns in OpenCode: their sessions, their prompts, and the interrupts that wait for a person."""
