"""The command line, run by ``python -m easydist``."""

from easydist.cli.main import main

if __name__ == "__main__":
    main(prog_name="easydist")
