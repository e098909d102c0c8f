"""``python -m opencode_a2a``."""

from opencode_a2a.cli import main

if __name__ == "__main__":
    main(prog_name="opencode-a2a")
