"""What the examples share: their flags, and the screen that each prints.

An example has a loss with a line of remat_opt on it, the same loss with ``jax.checkpoint`` or
``nn.remat`` around every block as you would write it by hand, and batches. Each version is
compiled, two are trained, and both must learn the same.
"""

import argparse
import re
import sys

import jax
import numpy as np
import optax

import remat_opt
from remat_opt.measurement.compilation import attached_device, compiler_options
from remat_opt.policies import default_policies
from remat_opt.units import format_bytes, format_share


def flags(description, **defaults):
    """The flags of an example, with small settings by default."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} if left out")
    parser.add_argument("--steps", type=int, default=30, help="of training; 0 trains nothing")
    parser.add_argument("--budget", type=float, default=0.4, help="share of the plain temporaries")
    parser.add_argument(
        "--device", default="attached", help="to plan and compile for; it need not be there"
    )
    parser.add_argument(
        "--compare", action="store_true", help="set it beside every policy of jax.checkpoint, too"
    )
    return parser.parse_args()


def plan_lines(plan):
    """What was decided, in four lines."""
    told = {fate: [d for d in plan.decisions if d.fate == fate] for fate in ("kept", "recomputed")}
    for one in plan.loop_values:
        # As many as there are iterations.
        if one.fate in told:
            told[one.fate] += [one] * one.runs
    checkpointed = sum(stage.checkpointed for stage in plan.stages)
    regions = "1 region" if len(plan.stages) == 1 else f"{len(plan.stages)} regions"
    yield (
        f"Kept:       {format_bytes(plan.predicted.kept_bytes)} in {len(told['kept'])} values, "
        f"mostly {most(told['kept'])}"
    )
    yield (
        f"Recomputed: {len(told['recomputed'])} values, "
        f"{format_share(plan.predicted.recomputed_share)} of the FLOPs of a forward pass"
    )
    yield f"Regions:    {regions}, {checkpointed} under jax.checkpoint"
    if plan.measured is not None:
        yield (
            f"Compiled:   {format_bytes(plan.measured.temporary_bytes)} in a step of Adam, within "
            f"the budget of {format_bytes(plan.budget_bytes)}"
        )
    for loop in plan.loops:
        length, count = sum(part.length for part in loop.parts), len(loop.parts)
        first = loop.parts[0]
        chunks = f" in chunks of {first.chunk}" if first.inside else ""
        yield (
            f"Loop:       scan of {length} in {count} part{'s' if count > 1 else ''}, the first of "
            f"{first.length}{chunks} that keep {format_bytes(first.kept_bytes)} each"
        )


def most(decisions):
    """What most of the bytes are."""
    sizes = {}
    for one in decisions:
        # The primitive of a relu is a custom_jvp_call, which says nothing.
        word = re.split(" in | of ", one.name.what)[0]
        word = "outputs of modules" if word == "output" else word
        sizes[word] = sizes.get(word, 0) + one.bytes
    return max(sizes, key=sizes.get, default="nothing")


def screen(title, loss_fn, example, by_hand, batches, options, *, has_aux=False):
    """Plans, compares, trains and prints the results; exits with a message if something is wrong.

    Args:
      title: the example's title.
      loss_fn: the decorated loss, called as ``loss_fn(params, *rest)``; with ``has_aux`` what it
        returns besides the loss is the next ``rest[0]``.
      example: arguments.
      by_hand: labels, each with the loss as you would write it by hand.
      batches: one tuple for each step.
      options: from ``flags``.
      has_aux: whether the loss returns more than a number.
    """
    plan = loss_fn.plan(*example)
    count = sum(np.size(leaf) for leaf in jax.tree.leaves(example[0]))
    print(f"{title}, {count:,} parameters, on {plan.device}\n")
    print(*plan_lines(plan), "", sep="\n")
    ours = f"ours, budget {format_bytes(plan.budget_bytes)}"
    planned = remat_opt.apply_plan(plan, loss_fn.__wrapped__, has_aux=has_aux)
    contenders = {name: name for name in default_policies()} if options.compare else {}
    found = remat_opt.compare(
        loss_fn.__wrapped__,
        *example,
        budgets=(None,),
        policies={**contenders, **by_hand, ours: planned},
        has_aux=has_aux,
        device=options.device,
    )
    print_table(found, ours)
    if options.steps and options.device == "attached":
        train_both(loss_fn, planned, example, batches, has_aux)


def print_table(found, ours):
    """The rows of a comparison that fit on a screen."""
    plain = found.rows[0]["temporary_bytes"]
    print(f"{'':38}{'temporaries':>12}{'of plain':>10}{'recomputed FLOPs':>18}")
    for row in found.rows:
        label = "ours, least memory" if row["kind"] == "ours" else row["label"]
        if row["error"]:
            print(f"{label:38}{row['error'][:60]}")
            continue
        size = row["temporary_bytes"]
        share = format_share(row["recomputed_flops_share"])
        print(f"{label:38}{format_bytes(size):>12}{format_share(size / plain):>10}{share:>18}")
        if label == ours and size >= plain:
            sys.exit("\nFAILED: the planned gradient needs no less memory.")


def compiled(loss_fn, example, has_aux):
    """The gradient as training runs it, compiled."""
    # jax.jit(jax.value_and_grad(loss_fn)) is all it takes, except that on a CPU, JAX before 0.11
    # undoes rematerialisation unless an option forbids it.
    gradient = jax.jit(
        jax.value_and_grad(loss_fn, has_aux=has_aux),
        compiler_options=compiler_options(attached_device()),
    )
    return gradient.lower(*example).compile()


def train(gradient, example, batches, has_aux):
    """The loss at every step."""
    params, *state = example[: 1 + has_aux]
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, len(batches)))
    moments = optimizer.init(params)
    update = jax.jit(optimizer.update)
    losses = []
    for batch in batches:
        loss, grads = gradient(params, *state, *batch)
        if has_aux:
            loss, state[0] = loss
        updates, moments = update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return np.array(losses)


def train_both(loss_fn, planned, example, batches, has_aux):
    """Trains with and without the line; the curves must agree."""
    curves = [
        train(compiled(fn, example, has_aux), example, batches, has_aux)
        for fn in (loss_fn.__wrapped__, planned)
    ]
    steps = np.linspace(0, len(batches) - 1, min(6, len(batches))).astype(int)
    print("\nstep         " + "".join(f"{step + 1:10}" for step in steps))
    for label, curve in zip(("plain loss", "planned loss"), curves, strict=True):
        print(f"{label:13}" + "".join(f"{curve[step]:10.5f}" for step in steps))
    # The same sums in another order may round differently, and training amplifies that.
    apart = np.max(np.abs(curves[0] - curves[1])) / np.max(np.abs(curves[0]))
    if not apart <= 1e-2:
        sys.exit(f"\nFAILED: the two runs differ by {apart:.1e}.")
    print(f"The same curve: the largest difference is {apart:.0e} of the largest loss.")
