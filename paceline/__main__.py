"""``python -m paceline`` is the command ``paceline``."""

from paceline.cli import app

if __name__ == "__main__":  # processes that multiprocessing spawns import this file, too
    app(prog_name="paceline")
