"""`python -m jax_mok COMMAND`: tools around the library."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_mok", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="what this machine can run, and why not the rest")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        from jax_mok import doctor

        return doctor.main()
    raise AssertionError(options.command)


if __name__ == "__main__":
    sys.exit(main())
