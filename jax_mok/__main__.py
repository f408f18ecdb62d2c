"""`python -m jax_mok COMMAND`: tools around the library."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_mok", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="what this machine can run, and why not the rest")
    bench = commands.add_parser("bench", help="jax_mok beside what else computes the layer")
    _bench_arguments(bench)
    profile = commands.add_parser(
        "profile", help="where the steps of a traced training run go, and what jax_mok could save"
    )
    _profile_arguments(profile)
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        from jax_mok import doctor

        return doctor.main()
    if options.command == "bench":
        from jax_mok.bench import run

        return run.main(options)
    if options.command == "profile":
        from jax_mok.profile import command

        return command.main(options)
    raise AssertionError(options.command)


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from jax_mok.bench import run

    run.add_arguments(parser)


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    from jax_mok.profile import command

    command.add_arguments(parser)


if __name__ == "__main__":
    sys.exit(main())
