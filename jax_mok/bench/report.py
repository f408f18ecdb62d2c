"""What a benchmark leaves behind: a table, a JSON file, a plot."""

import datetime
import json
import pathlib
import platform
from typing import Any

import jax
import jaxlib

import jax_mok

RESULTS = pathlib.Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Conditions of a run: versions, devices, date."""
    devices = jax.devices()
    return {
        "date": datetime.date.today().isoformat(),
        "jax_mok": jax_mok.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "platform": devices[0].platform,
    }


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """One line per candidate; those that could not run say why."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("candidate", "ms", "min-max", "TFLOP/s per device", "of the floor", "temp MB"):
        table.add_column(column, justify="left" if column == "candidate" else "right")
    for row in rows:
        if "why_not" in row:
            table.add_row(row["candidate"], "-", "", "", "", "", style="dim")
            continue
        low, high = row["spread_ms"]
        memory = row["temp_bytes"]
        table.add_row(
            row["candidate"],
            f"{row['ms']:.3f}",
            f"{low:.3f}-{high:.3f}",
            f"{row['tflops']:.3g}",
            f"{row['share_of_floor']:.0%}",
            "-" if memory is None else f"{memory / 1e6:.0f}",
        )
    console = Console(width=max(100, Console().width))
    console.print(table)
    for row in rows:
        if "why_not" in row:
            console.print(f"{row['candidate']}: not run: {row['why_not']}", style="dim")


def save(name: str, record: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def plot(record: dict[str, Any], path: pathlib.Path) -> None:
    """Milliseconds: lines over what was swept (tokens or minibatch), else bars per problem."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    problems = record["problems"]
    swept = [
        field
        for field in ("tokens", "minibatch")
        if len({p["problem"][field] for p in problems}) == len(problems) > 1
        and None not in {p["problem"][field] for p in problems}
    ]
    if swept:
        figure = _lines(plt, problems, swept[0])
    else:
        figure = _bars(plt, problems)
    env = record["environment"]
    figure.suptitle(
        f"{env['devices']} x {env['device']}, jax {env['jax']}, {env['date']}; dashed: floor",
        fontsize=8,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _candidates(problems) -> list[str]:
    """Those that ran anywhere, in order."""
    rows = [row for problem in problems for row in problem["rows"] if "ms" in row]
    return list(dict.fromkeys(row["candidate"] for row in rows))


def _bars(plt, problems):
    names = _candidates(problems)
    figure, axes = plt.subplots(
        1, len(problems), figsize=(2 + 3 * len(problems), 3.6), squeeze=False
    )
    for axis, problem in zip(axes[0], problems):
        times = {row["candidate"]: row["ms"] for row in problem["rows"] if "ms" in row}
        colors = ["C0" if name == "jax_mok" else "0.7" for name in names]
        axis.bar(names, [times.get(name, 0) for name in names], color=colors)
        for x, name in enumerate(names):
            text = f"{times[name]:.3g}" if name in times else "not run"
            axis.text(x, times.get(name, 0), text, ha="center", va="bottom", fontsize=8)
        axis.axhline(problem["floor_ms"], color="C3", linewidth=1, linestyle="--")
        axis.set_title(problem["title"].replace("; ", "\n"), fontsize=7)
        axis.set_ylabel("ms")
        axis.margins(y=0.15)
        axis.tick_params(axis="x", labelrotation=20)
    return figure


def _lines(plt, problems, field: str):
    figure, axis = plt.subplots(figsize=(6, 4))
    for name in _candidates(problems):
        points = [
            (problem["problem"][field], row["ms"])
            for problem in problems
            for row in problem["rows"]
            if row["candidate"] == name and "ms" in row
        ]
        axis.plot(*zip(*points), marker="o", label=name)
    floor = [(problem["problem"][field], problem["floor_ms"]) for problem in problems]
    axis.plot(*zip(*floor), color="C3", linestyle="--", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel({"tokens": "tokens per rank", "minibatch": "minibatch rows"}[field])
    axis.set_ylabel("ms")
    axis.set_title(problems[0]["title"].replace("; ", "\n"), fontsize=7)
    axis.legend()
    return figure
