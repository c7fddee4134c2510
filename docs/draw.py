"""Draws the pictures of the documentation, and writes down the figures in them.

    python docs/draw.py algorithms      # seconds; solvers only
    python docs/draw.py compilers       # a minute; compiles for an H200 (extra `cuda`, JAX 0.12)

Nothing is drawn by hand: each picture is the answer of a solver of this package, replayed by its
simulator, or what a compiler says about a program. ``figures_*.json`` holds the numbers; the tests
recompute those of the algorithms.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from remat_opt import solvers
from remat_opt.graph import Graph
from remat_opt.offload.chain import Chain, in_grains
from remat_opt.offload.simulator import schedule as timeline_of
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import Simulation, simulate
from remat_opt.solvers import integer_program, min_cut, offload_dynamic_program, staged_program
from remat_opt.solvers.base import (
    Candidate,
    Overhead,
    Solution,
    fastest_within,
    least_memory,
    pareto,
)

FOLDER = Path(__file__).parent / "pictures"
KEPT, AGAIN, IDLE, INK, FAINT = "#2563a8", "#d9822b", "#b8bec6", "#30363d", "#8a929c"
PHASES = {"forward": KEPT, "recompute": AGAIN, "backward": "#5a8f5a"}

#: The graph that all algorithms are shown on: three residual blocks, as small as possible. A
#: convolution takes 8 ms, the rest 1 ms; each value takes 8 MiB, the loss 1.
NAMES = (
    "stem",
    *(f"{part}{block}" for block in (1, 2, 3) for part in ("conv", "relu", "add")),
    "loss",
)
SKIPS = ((0, 3), (3, 6), (6, 9))
BUDGET = 0.75  # of what the plain graph takes, for those algorithms that are asked for a budget


def graph() -> Graph:
    """The graph of all pictures; bytes stand for MiB and seconds for milliseconds."""
    steps = [(vertex, vertex + 1) for vertex in range(len(NAMES) - 1)]
    return Graph.from_edges(
        [8] * (len(NAMES) - 1) + [1],
        [*steps, *SKIPS],
        seconds=[8.0 if name.startswith(("stem", "conv")) else 1.0 for name in NAMES],
        names=NAMES,
    )


def budget() -> float:
    """The budget for the algorithms that take one."""
    return BUDGET * simulate(graph(), plain(graph())).peak_bytes


def answers() -> dict[str, Schedule]:
    """What each algorithm decides, by the name of its picture."""
    given = graph()

    def found(solver: solvers.Solver) -> list[Candidate]:
        candidates = solver.candidates(given)
        assert isinstance(candidates, list), candidates
        return candidates

    def least(solver: solvers.Solver) -> Schedule:
        return least_memory(found(solver), Overhead.SECONDS).schedule

    def within(solver: solvers.Solver) -> Schedule:
        one = fastest_within(found(solver), budget(), Overhead.SECONDS)
        assert one is not None, f"{solver} has no answer within the budget"
        return one.schedule

    exact = integer_program.least_overhead(given, budget())
    assert isinstance(exact, Solution), exact
    return {
        "plain": plain(given),
        "sublinear": least(solvers.Sublinear(nested=False)),
        "sublinear_recursive": least(solvers.Sublinear()),
        "reforwarding": least(solvers.ArbitraryGraph()),
        "lower_sets_time": least(solvers.ApproximateDP()),
        "lower_sets_memory": least(solvers.ApproximateDP(objective="memory")),
        "revolve": least(solvers.Revolve(snapshots=2)),
        "heterogeneous_chain": within(solvers.HeterogeneousChain()),
        "integer_program": exact.schedule,
        "portfolio": within(solvers.Portfolio()),
    }


def chain() -> Chain:
    """The same network for offloading: a block is a stage, the link moves 1 MiB per ms."""
    return Chain(
        forward_seconds=(8.0, 10.0, 10.0, 10.0, 1.0),
        backward_seconds=(16.0, 20.0, 20.0, 20.0, 2.0),
        activation_bytes=(8, 8, 8, 8, 8, 1),
        gradient_bytes=(8, 8, 8, 8, 8, 1),
        forward_extra_bytes=(0, 16, 16, 16, 0),
        backward_extra_bytes=(0, 16, 16, 16, 0),
        bandwidth_bytes_per_second=1.0,
        device_bytes=56,
    )


def figures() -> dict[str, dict[str, Any]]:
    """The numbers in the pictures of the algorithms."""
    given = graph()
    table: dict[str, dict[str, Any]] = {}
    for name, schedule in answers().items():
        replayed = simulate(given, schedule)
        table[name] = {
            "peak_mib": replayed.peak_bytes,
            "recomputed_ms": replayed.overhead_seconds,
            "recomputed": [NAMES[vertex] for vertex in replayed.recomputed],
            "stored": [NAMES[vertex] for vertex in replayed.stored],
        }
    table["min_cut"] = {
        "hull": [[cut.bytes, cut.seconds, list(cut.kept)] for cut in min_cut.breakpoints(given)]
    }
    staged = staged_program.least_overhead(given, budget())
    assert isinstance(staged, staged_program.Staged), staged
    table["staged_program"] = {
        "peak_mib": staged.peak_bytes,
        "recomputed_ms": staged.overhead_seconds,
        "proven": staged.gap == 0,
    }
    offloaded = offload_dynamic_program.exact_dynamic_program(chain())
    table["offload"] = {
        "peak_mib": offloaded.simulation.peak_bytes,
        "without_mib": chain().peak_bytes,
        "idle_ms": offloaded.simulation.idle_seconds,
        "moved_mib": offloaded.simulation.transferred_bytes,
    }
    return table


# ------------------------------------------------------------------------------------- drawing


def draw_schedule(name: str, schedule: Schedule) -> None:
    """One algorithm's answer: the graph with regions and fates, and the memory over time."""
    given = graph()
    replayed = simulate(given, schedule)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7.2, 3.5), height_ratios=(1.15, 1), layout="constrained"
    )
    _draw_graph(top, given, schedule, replayed)
    _draw_memory(bottom, replayed, simulate(given, plain(given)))
    _save(figure, name)


def _draw_graph(axes: Any, given: Graph, schedule: Schedule, replayed: Simulation) -> None:
    for region in schedule.regions:
        _draw_region(axes, region, 0)
    for source, readers in enumerate(given.successors()):
        for target in readers:
            bend = 0.0 if target == source + 1 else -0.38
            axes.add_patch(
                FancyArrowPatch(
                    (source, 0),
                    (target, 0),
                    arrowstyle="-|>",
                    connectionstyle=f"arc3,rad={bend}",
                    mutation_scale=9,
                    shrinkA=9,
                    shrinkB=9,
                    color=FAINT,
                    lw=1,
                    zorder=2,
                )
            )
    for vertex, name in enumerate(given.names):
        times = replayed.recomputed.count(vertex)
        stored = vertex in replayed.stored
        fill = KEPT if stored else AGAIN if times else "white"
        axes.plot(vertex, 0, "o", ms=17, mfc=fill, mec=INK if fill == "white" else fill, zorder=3)
        if times and stored:  # Kept for one level of the chain, and run again on another.
            axes.plot(vertex, 0, "o", ms=17, mfc="none", mec=AGAIN, mew=3, zorder=3)
        if times:
            axes.text(
                vertex, 0, f"{times}x", color="white", ha="center", va="center", size=8, zorder=4
            )
        axes.text(vertex, -0.98, name, ha="center", va="top", size=8.5, color=INK)
    axes.set(xlim=(-0.75, len(given) - 0.25), ylim=(-1.35, 1.35))
    axes.axis("off")


def _draw_region(axes: Any, region: Region, depth: int) -> None:
    first, last = region.vertices[0], region.vertices[-1]
    edge = 0.46 - 0.07 * depth
    height = 0.82 - 0.14 * depth
    axes.add_patch(
        FancyBboxPatch(
            (first - edge, -height),
            last - first + 2 * edge,
            2 * height,
            boxstyle="round,pad=0,rounding_size=0.12",
            fc="#f3f6fa" if region.checkpointed else "white",
            ec=INK if region.checkpointed else IDLE,
            ls="-" if region.checkpointed else (0, (3, 2)),
            lw=1.1,
            zorder=1,
        )
    )
    for inner in region.inside:
        _draw_region(axes, inner, depth + 1)


def _draw_memory(axes: Any, replayed: Simulation, before: Simulation) -> None:
    axes.step(
        [n + 1 for n in range(len(before.moments))],
        [one.live_bytes for one in before.moments],
        where="mid",
        color=IDLE,
        lw=1.2,
        label=f"plain: {before.peak_bytes} MiB",
    )
    told = set()
    for number, one in enumerate(replayed.moments):
        axes.bar(
            number + 1,
            one.live_bytes,
            width=1.0,
            color=PHASES[one.phase],
            label=None if one.phase in told else one.phase,
        )
        told.add(one.phase)
    axes.axhline(replayed.peak_bytes, color=INK, lw=0.8, ls=":")
    share = replayed.overhead_seconds / graph().forward_seconds
    axes.set_title(
        f"peak {replayed.peak_bytes} MiB, {replayed.overhead_seconds:.0f} ms computed again "
        f"({share:.0%} of a forward pass)",
        size=9.5,
        loc="left",
    )
    axes.set(xlabel="step", ylabel="MiB alive", ylim=(0, before.peak_bytes * 1.3))
    axes.legend(ncols=4, fontsize=7.5, frameon=False, loc="upper left")
    _plain_axes(axes)


def draw_hull() -> None:
    """Minimum cuts: the kept sets on the convex hull, and what each keeps."""
    hull = min_cut.breakpoints(graph())
    figure, axes = plt.subplots(figsize=(7.2, 3.0), layout="constrained")
    axes.plot([cut.bytes for cut in hull], [cut.seconds for cut in hull], "o-", color=KEPT)
    for number, cut in enumerate(hull):
        axes.annotate(
            _named(cut.kept),
            (cut.bytes, cut.seconds),
            xytext=(6, 5 + 4 * (number % 2)),
            textcoords="offset points",
            size=7.5,
            color=INK,
        )
    axes.set(xlabel="MiB kept", ylabel="ms computed again", ylim=(-3, None))
    axes.margins(x=0.18)
    _plain_axes(axes)
    _save(figure, "min_cut")


def _named(kept: tuple[int, ...]) -> str:
    if len(kept) == len(NAMES):
        return "keep everything"
    return "keep " + (", ".join(NAMES[vertex] for vertex in kept) or "nothing")


def draw_stages() -> None:
    """Checkmate's matrix: what is in memory, and what runs again, at every step."""
    given = graph()
    staged = staged_program.least_overhead(given, budget())
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for row, stage in enumerate(staged.stages):
        for vertex in stage.held:
            axes.plot(vertex, row, "s", ms=8.5, color=KEPT)
        for vertex in stage.again:
            axes.plot(vertex, row, "s", ms=8.5, color=AGAIN)
        if stage.phase == "forward":
            axes.plot(stage.vertex, row, "s", ms=8.5, mfc="none", mec=INK)
        else:
            axes.plot(stage.vertex, row, "x", ms=6, color=INK)
    axes.set_xticks(range(len(given)), given.names, size=8)
    axes.yaxis.set_major_locator(mpl.ticker.MultipleLocator(5))
    axes.set(ylabel="step: forward, then backward", ylim=(len(staged.stages) - 0.3, -0.7))
    for colour, marker, label in (
        (KEPT, "s", "in memory when the step begins"),
        (AGAIN, "s", "computed again for it"),
    ):
        axes.plot([], [], marker, color=colour, label=label)
    axes.plot([], [], "s", mfc="none", mec=INK, label="forward step")
    axes.plot([], [], "x", color=INK, label="backward step")
    axes.legend(ncols=4, fontsize=7.5, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0))
    _plain_axes(axes)
    _save(figure, "staged_program")


def draw_offload() -> None:
    """Offloading: what computes, what is on its way, and the memory of the device."""
    given = chain()
    answer = offload_dynamic_program.exact_dynamic_program(given)
    simulation, exact = answer.simulation, in_grains(given)
    amounts = [int(moved * exact.grains_per_byte) for moved in answer.amounts_bytes]
    timeline = timeline_of(exact, amounts, answer.transfers)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7.2, 3.2), sharex=True, layout="constrained"
    )
    colours = {"forward": KEPT, "backward": PHASES["backward"], "offload": AGAIN, "prefetch": AGAIN}
    for piece in (*timeline.operations, *timeline.transfers):
        moves = piece.kind.value in ("offload", "prefetch")
        start, end = exact.seconds(piece.start_grains), exact.seconds(piece.end_grains)
        top.barh(
            0 if moves else 1, end - start, left=start, color=colours[piece.kind.value], ec="white"
        )
        sign = {"forward": "F", "backward": "B", "offload": "x", "prefetch": "x"}[piece.kind.value]
        arrow = {"offload": " out", "prefetch": " in"}.get(piece.kind.value, "")
        if end - start > 4:
            top.text(
                (start + end) / 2,
                0 if moves else 1,
                f"{sign}{piece.index}{arrow}",
                ha="center",
                va="center",
                color="white",
                size=8,
            )
    top.set_yticks([0, 1], ["link", "device"], size=8.5)
    for sample in simulation.memory:
        bottom.fill_between(
            [sample.seconds, sample.until_seconds],
            [sample.start_bytes, sample.end_bytes],
            color=KEPT,
            lw=0,
        )
    bottom.axhline(given.device_bytes, color=INK, lw=1, ls=":")
    bottom.text(1, given.device_bytes + 1, f"device: {given.device_bytes} MiB", size=8)
    bottom.set(xlabel="ms", ylabel="MiB held", ylim=(0, given.peak_bytes * 1.1))
    _plain_axes(top)
    _plain_axes(bottom)
    _save(figure, "offload")


def draw_overview() -> None:
    """All algorithms on one plane: peak and recomputation of every answer they have."""
    given = graph()
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    shown = {
        "Chen": (solvers.Sublinear(), "s"),
        "re-forwarding": (solvers.ArbitraryGraph(), "D"),
        "Kusumoto": (solvers.ApproximateDP(), "^"),
        "Revolve": (solvers.Revolve(), "v"),
        "Gruslys": (solvers.HeterogeneousChain(), "P"),
        "integer program": (solvers.IntegerProgram(), "*"),
    }
    ours = pareto(solvers.Portfolio().candidates(given), Overhead.SECONDS)
    axes.plot(
        [one.peak_bytes for one in ours],
        [one.overhead_seconds for one in ours],
        "o-",
        color=KEPT,
        ms=5,
        lw=1.4,
        label="portfolio (the default)",
    )
    for label, (solver, marker) in shown.items():
        found = solver.candidates(given)
        axes.plot(
            [one.peak_bytes for one in found],
            [one.overhead_seconds for one in found],
            marker,
            ms=7,
            mfc="none",
            mew=1.3,
            label=label,
        )
    axes.axhline(given.forward_seconds, color=FAINT, lw=0.8, ls=":")
    axes.text(
        simulate(given, plain(given)).peak_bytes,
        given.forward_seconds + 1.5,
        "one forward pass",
        size=8,
        color=FAINT,
        ha="right",
    )
    axes.set(xlabel="peak, MiB", ylabel="ms computed again")
    axes.legend(fontsize=8, frameon=False)
    _plain_axes(axes)
    _save(figure, "overview")


def draw_algorithms() -> None:
    """All pictures of the page on algorithms, and their figures."""
    for name, schedule in answers().items():
        draw_schedule(name, schedule)
    draw_hull()
    draw_stages()
    draw_offload()
    draw_overview()
    _write("figures_algorithms.json", figures())


# ----------------------------------------------------------------------------------- compilers


def draw_compilers() -> None:
    """Memory over time of the same layers in four ways, and what memory costs, as compiled."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp

    import remat_opt
    from remat_opt.measurement.compilation import compiled_memory

    layers, rows, width = 16, 8192, 1024
    x = jax.ShapeDtypeStruct((rows, width), "float32")
    weights = [jax.ShapeDtypeStruct((width, width), "float32")] * layers

    def run(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w) + x
        return x

    def loss(weights, x):
        return jnp.mean(run(weights, x) ** 2)

    def each_layer(weights, x):
        for w in weights:
            x = jax.checkpoint(run)([w], x)
        return jnp.mean(x**2)

    def chain_of_four(weights, x):
        for start in range(0, layers - 4, 4):
            x = jax.checkpoint(run)(weights[start : start + 4], x)
        return jnp.mean(run(weights[-4:], x) ** 2)

    ways = {
        "plain": loss,
        "one checkpoint around the whole loss": jax.checkpoint(loss),
        "a checkpoint around each layer": each_layer,
        "a chain: a checkpoint around every four layers": chain_of_four,
    }

    def step(way):
        return lambda weights, x: jax.tree.map(
            lambda w, g: w - 0.1 * g, weights, jax.grad(way)(weights, x)
        )

    table: dict[str, Any] = {"device": "h200", "jax": jax.__version__, "ways": {}}
    figure, panels = plt.subplots(4, 1, figsize=(7.2, 6.4), sharey=True, layout="constrained")
    for axes, (label, way) in zip(panels, ways.items(), strict=True):
        memory = compiled_memory(step(way), weights, x, device="h200", donate_argnums=0)
        alive = memory.timeline / 2**20
        axes.fill_between(range(len(alive)), alive, step="mid", color=KEPT, lw=0)
        axes.set_title(f"{label}: {memory.heap_bytes / 2**20:,.0f} MiB", size=9.5, loc="left")
        axes.set(ylabel="MiB alive")
        axes.margins(x=0.01)
        _plain_axes(axes)
        table["ways"][label] = round(memory.heap_bytes / 2**20)
    panels[-1].set_xlabel("instruction of the compiled step, in order of execution")
    _save(figure, "memory_over_time")

    decorated = remat_opt.optimal_remat(loss)

    def training_step(weights, x):
        gradients = jax.grad(decorated)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    found = remat_opt.compare(
        training_step,
        weights,
        x,
        donate_argnums=0,
        device="h200",
        budgets=[0.8, 0.65, 0.5, 0.4, 0.3, None],
        policies=["dots_saveable", "nothing_saveable"],
        overhead="flops",
    )
    table["comparison"] = {
        row["label"]: [
            row["kind"],
            round(row["temporary_bytes"] / 2**20),
            round(row["recomputed_flops_share"], 3),
        ]
        for row in found.rows
        if row["temporary_bytes"] is not None
    }
    draw_trade_off(table["comparison"])
    _write("figures_compilers.json", table)


def draw_trade_off(rows: dict[str, list[Any]]) -> None:
    """Memory against recomputation: ours as a line, the defaults as points with labels."""
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    ours = sorted((mib, share) for kind, mib, share in rows.values() if kind in ("ours", "plain"))
    axes.plot(*zip(*ours, strict=True), "o-", color=KEPT, label="remat_opt", zorder=1)
    # Defaults with almost the same figures share a label.
    places: dict[tuple[int, int], list[str]] = {}
    for label, (kind, mib, share) in rows.items():
        if kind != "ours":
            axes.plot(mib, share, "s", color=AGAIN)
            places.setdefault((round(mib / 80), round(10 * share)), []).append(label)
    for labels in places.values():
        _, mib, share = rows[labels[0]]
        axes.annotate(
            "\n".join(labels),
            (mib, share),
            xytext=(6, 6),
            textcoords="offset points",
            size=8,
            color=INK,
        )
    axes.set(xlabel="temporaries as compiled, MiB", ylabel="recomputed, of a forward pass")
    axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0))
    axes.margins(x=0.16, y=0.12)
    axes.legend(frameon=False, fontsize=8)
    _plain_axes(axes)
    _save(figure, "trade_off")


# -------------------------------------------------------------------------------------- common


def _plain_axes(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8)
    axes.xaxis.label.set_size(8.5)
    axes.yaxis.label.set_size(8.5)


def _save(figure: Any, name: str) -> None:
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def _write(name: str, table: dict[str, Any]) -> None:
    (FOLDER / name).write_text(json.dumps(table, indent=1) + "\n")


def main(wanted: list[str]) -> None:
    """Draws what is named on the command line."""
    parts = {"algorithms": draw_algorithms, "compilers": draw_compilers}
    if not wanted or set(wanted) - set(parts):
        sys.exit(f"Say what to draw: {', '.join(parts)}.")
    mpl.use("svg")
    # Text as text keeps the files small; the salt keeps them the same from one run to the next.
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "remat_opt",
            "font.family": "sans-serif",
            "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
            "savefig.facecolor": "white",
            "text.color": INK,
            "axes.labelcolor": INK,
        }
    )
    FOLDER.mkdir(exist_ok=True)
    for part in wanted:
        parts[part]()


if __name__ == "__main__":
    main(sys.argv[1:])
