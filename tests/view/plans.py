"""Plans as plain data, for tests of the views."""

MIB = 1024**2


def timeline(kept, **kinds):
    """Amounts in MiB; one array is alive at all moments."""
    count = len(kept)
    nothing = dict.fromkeys(
        ("boundaries", "passing", "recomputed", "gradients", "workspace"), [0] * count
    )
    amounts = {**nothing, "kept": kept, **kinds}
    return {
        "steps": count,
        "at": list(range(count)),
        "phases": ["forward", *["backward"] * (count - 1)][:count],
        "roots": [0] * count,
        **{kind: [MIB * amount for amount in told] for kind, told in amounts.items()},
        "arrays": [{"root": 0, "kind": "kept", "bytes": MIB, "first": 0, "last": count - 1}]
        if count
        else [],
    }


def named(**changes):
    return {
        "what": "matrix product with w",
        "module": "",
        "source": "train.py:3 (loss)",
        "shape": [8, 8],
        "dtype": "float32",
        "primitive": "dot_general",
        **changes,
    }


def decision(fate="kept", **changes):
    names = {key: changes.pop(key) for key in named() if key in changes}
    return {
        "root": 0,
        "name": named(**names),
        "region": 0,
        "fate": fate,
        "times": 1 if fate == "recomputed" else 0,
        "bytes": MIB,
        "seconds": 1e-6,
        "flops": 1000,
        **changes,
    }


def loop_value(fate="kept", **changes):
    names = {key: changes.pop(key) for key in named() if key in changes}
    return {
        **{"loop": 0, "part": "iterations 1 to 4 of 6", "name": named(**names), "fate": fate},
        **{"handed_on": False, "times": 1 if fate == "recomputed" else 0, "runs": 4},
        **{"bytes": MIB, "seconds": 1e-6, "flops": 1000},
        **changes,
    }


#: What a training step holds throughout.
RESIDENT = {"parameters": MIB, "optimizer_state": 2 * MIB, "inputs": MIB // 2, "results": 0}


def plan(*, decisions=(), predicted=None, objective=None, **changes):
    return {
        "function": "loss",
        "fingerprint": "0123456789abcdef",
        "device": "h200",
        "objective": {
            **{"budget_bytes": None, "budget_share": None, "max_overhead": None},
            **{"fit": False, "reserve_bytes": 0},
            "overhead": "seconds",
            **(objective or {}),
        },
        "budget_bytes": None,
        "solver": "portfolio",
        "loops": [],
        "unchanged": False,
        "stages": [
            {"roots": [0], "kept": [0], "checkpointed": True, "inside": []},
            {"roots": [1], "kept": [], "checkpointed": False, "inside": []},
        ],
        "decisions": list(decisions),
        "loop_values": [],
        "predicted": {
            "temporary_bytes": 3 * MIB,
            "model_bytes": 3 * MIB,
            "plain_temporary_bytes": 4 * MIB,
            "kept_bytes": 2 * MIB,
            "overhead_seconds": 1e-6,
            "forward_seconds": 1e-5,
            "recomputed_flops": 1000,
            "forward_flops": 4000,
            "timeline": timeline([1, 2, 2], gradients=[0, 1, 0]),
            "plain_timeline": timeline([1, 3, 2], gradients=[0, 1, 0]),
            "pins": [],
            **(predicted or {}),
        },
        "measured": None,
        "resident": None,
        "as_compiled": [],
        "notes": [],
        "remat_opt_version": "0.1.0",
        "jax_version": "0.10.2",
        **changes,
    }


MEASURED = {
    **{"device": "h200", "argument_bytes": MIB, "output_bytes": 2 * MIB, "host_bytes": 0},
    **{"temporary_bytes": 3 * MIB + MIB // 4, "alias_bytes": 0, "flops": None},
    "recomputation": None,
    **{"compile_seconds": 2.0, "jax_version": "0.10.2", "compiler_version": "", "notes": []},
}
