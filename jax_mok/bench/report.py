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
    """Bars: milliseconds of each candidate, one group for each problem."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    problems = record["problems"]
    names = [r["candidate"] for r in problems[0]["rows"]]
    figure, axes = plt.subplots(
        1, len(problems), figsize=(1.5 + 2.6 * len(problems), 3.4), squeeze=False
    )
    for axis, problem in zip(axes[0], problems):
        rows = {r["candidate"]: r for r in problem["rows"] if "ms" in r}
        bars = [rows[n]["ms"] if n in rows else 0 for n in names]
        colors = ["C0" if n == "jax_mok" else "0.7" for n in names]
        axis.bar(names, bars, color=colors)
        for x, value in enumerate(bars):
            axis.text(x, value, f"{value:.3g}" if value else "n/a", ha="center", va="bottom")
        axis.axhline(problem["floor_ms"], color="C3", linewidth=1, linestyle="--")
        axis.set_title(problem["title"], fontsize=8)
        axis.set_ylabel("ms")
        axis.margins(y=0.15)
        axis.tick_params(axis="x", labelrotation=20)
    env = record["environment"]
    figure.suptitle(
        f"{env['devices']} x {env['device']}, jax {env['jax']}, {env['date']}; dashed: floor",
        fontsize=8,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
