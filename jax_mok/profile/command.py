"""The command `profile`: its arguments, and what it does with them."""

import argparse
import importlib.util
import json
import pathlib
import re
import sys

from jax_mok.profile import analysis, report, trace
from jax_mok.profile.classify import Classifier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", metavar="TRACE_DIR", help="what jax.profiler.trace was given, or a file of it"
    )
    parser.add_argument("--run", metavar="NAME", help="which run, by its folder; default: newest")
    parser.add_argument(
        "--experts",
        metavar="REGEX",
        help="more name scopes or kernels that are MoE layers, beside moe, expert, ragged_dot, ...",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="keep all numbers")
    parser.add_argument("--picture", type=pathlib.Path, metavar="FILE.png", help="draw them")


def main(options: argparse.Namespace) -> int:
    """Prints the report; returns the exit status."""
    for module in ("rich", "matplotlib") if options.picture else ("rich",):
        if importlib.util.find_spec(module) is None:
            return _failed(
                f"it needs {module}, which is not installed: pip install 'jax_mok[bench]'"
            )
    try:
        classifier = Classifier(options.experts)
    except re.error as e:
        return _failed(f"--experts {options.experts!r} is no regular expression: {e}")
    try:
        run = trace.read(options.trace, options.run)
    except trace.TraceError as e:
        return _failed(str(e))
    devices = analysis.analyse(run, classifier)
    report.print_tables(run, devices)
    if options.json:
        text = json.dumps(report.record(run, devices, options.experts), indent=1)
        options.json.write_text(text + "\n")
        print(f"kept in {options.json}")
    if options.picture:
        report.picture(run, devices, classifier, options.picture)
        print(f"drawn in {options.picture}")
    return 0


def _failed(why: str) -> int:
    print(f"profile: {why}", file=sys.stderr)
    return 2
