"""``python -m easydist``: the command line."""

from easydist.cli.main import main

if __name__ == "__main__":
    main(prog_name="easydist")
