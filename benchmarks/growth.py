"""How costs grow: an update with batch and samples, a frame with the size of the replay buffer.

    python benchmarks/growth.py --out growth.png
    python benchmarks/growth.py --json

An update of MPO evaluates the target critic at batch times samples actions; the exponent of a fit
over that product says whether its time grows faster. That of a run with `compile.enabled=true` is
there as well, unless `--no-compile` is given. Collecting, storing and drawing should cost the same
at a million stored frames as at ten thousand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _harness import Result, add_compile, make_parser, measure, report, start
from end_to_end import make_config
from mpo_update import make_data, make_ours
from replay import Filled

from minerva_torchrl.runs.assemble import assemble
from minerva_torchrl.trainers import make_target_updater

BATCHES, SAMPLES = (64, 128, 256, 512, 1024), (5, 20, 80)
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
LAYERS = (512, 256)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least-squares line through the logarithms: p of ``y = c x ** p``."""
    log_x, log_y = ([math.log(value) for value in values] for values in (x, y))
    mean_x, mean_y = sum(log_x) / len(log_x), sum(log_y) / len(log_y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(log_x, log_y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in log_x)


def update_cases(
    batches: Sequence[int], samples: Sequence[int], layers: tuple[int, ...]
) -> dict[tuple[int, int], Callable[[], object]]:
    """An update of MPO by batch size and number of samples."""
    cases = {}
    for batch in batches:
        for count in samples:
            config = (17, 6, batch, layers, count)
            loss, stepper = make_ours(config, "default")
            updater = make_target_updater(loss, period=100)
            data = make_data(config)

            def update(loss=loss, stepper=stepper, updater=updater, data=data) -> None:
                stepper.update(loss, data)
                updater.step()

            cases[batch, count] = update
    return cases


def compiled_cases(
    env: str, batches: Sequence[int], count: int, layers: tuple[int, ...]
) -> dict[tuple[int, int], Callable[[], object]]:
    """An update of a run that compiles them, by batch size and number of samples."""
    cases = {}
    for batch in batches:
        sizes = {"actor_sizes": list(layers), "critic_sizes": list(layers)}
        config = make_config(
            env,
            network=sizes,
            loss={"num_action_samples": count},
            replay_buffer={"batch_size": batch, "n_steps": 1},
            compile={"enabled": True},
        )
        assembly = assemble(config)
        shapes = assembly.env.observation_spec["observation"], assembly.env.action_spec
        data = make_data((*(spec.shape[-1] for spec in shapes), batch, layers, count))
        trainer = assembly.trainer
        stepper = trainer.optimization_stepper
        cases[batch, count] = partial(stepper.step, trainer, data)
    return cases


def measure_updates(
    batches: Sequence[int],
    samples: Sequence[int],
    layers: tuple[int, ...] = LAYERS,
    *,
    compiled_in: str | None = None,
    **kwargs: Any,
) -> tuple[dict[tuple[int, int], Result], dict[tuple[int, int], Result]]:
    """Times by batch size and samples: as they are, and compiled if a task is given for it.

    Those that are compiled have the number of samples in the middle, because each takes its time
    to compile.
    """
    plain = update_cases(batches, samples, layers)
    middle = samples[len(samples) // 2]
    compiled = {}
    if compiled_in is not None:
        compiled = compiled_cases(compiled_in, batches, middle, layers)
    named = {f"batch {batch}, {count} samples": case for (batch, count), case in plain.items()}
    named |= {
        f"batch {batch}, {count} samples, compiled": case
        for (batch, count), case in compiled.items()
    }
    results = iter(measure(named, warmup=1, **kwargs).values())
    return {key: next(results) for key in plain}, {key: next(results) for key in compiled}


def replay_cases(filled: Filled) -> dict[str, Callable[[], object]]:
    """What training does with a frame, besides the update, in calls of one collected batch."""
    batches = iter(filled.assembly.collector)

    def collect_and_store() -> None:
        filled.memory.extend(next(batches))

    def store_and_draw() -> None:
        filled.memory.extend(filled.new)
        for _ in range(10):
            filled.memory.sample()

    return {"collect and store": collect_and_store, "store, draw 10 times": store_and_draw}


def measure_replay(
    env: str, sizes: Sequence[int], length: int = 5, batch: int = 128, **kwargs: Any
) -> dict[str, dict[int, Result]]:
    """Times per frame by what is done and by stored frames; sizes are interleaved."""
    filled = {size: Filled(env, size, length, batch) for size in sizes}
    frames = filled[sizes[0]].new.numel()
    cases = {
        (what, size): case for size in sizes for what, case in replay_cases(filled[size]).items()
    }
    named = {f"{what}, {size} frames": case for (what, size), case in cases.items()}
    results = measure(named, per=frames, **kwargs)
    by_kind: dict[str, dict[int, Result]] = {}
    for (what, size), result in zip(cases, results.values(), strict=True):
        by_kind.setdefault(what, {})[size] = result
    for one in filled.values():
        one.assembly.collector.shutdown()
    return by_kind


def draw(
    updates: dict[tuple[int, int], Result],
    compiled: dict[tuple[int, int], Result],
    replay: dict[str, dict[int, Result]],
    out: Path,
) -> None:
    """A plot of all, with logarithmic axes."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for count in dict.fromkeys(count for _, count in updates):
        points = {b * n: r.median for (b, n), r in updates.items() if n == count}
        left.plot(points.keys(), points.values(), "o-", label=f"{count} samples")
    if compiled:
        points = {b * n: result.median for (b, n), result in compiled.items()}
        (count,) = {count for _, count in compiled}
        left.plot(points.keys(), points.values(), "s--", label=f"{count} samples, compiled")
    left.set(xlabel="batch × samples", ylabel="ms per update", title="MPO update")
    for what, by_size in replay.items():
        right.plot(by_size.keys(), [r.median for r in by_size.values()], "o-", label=what)
    right.set(xlabel="stored frames", ylabel="ms per frame", title="replay buffer", ylim=(0, None))
    left.set(xscale="log", yscale="log")
    right.set(xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = make_parser(__doc__, rounds=5, threads=1)
    parser.add_argument("--env", default="cheetah-run", help="task (cheetah-run)")
    parser.add_argument("--out", type=Path, help="file for a plot (PNG)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="stored frames")
    add_compile(parser)
    args = start(parser)
    timing = {"rounds": args.rounds, "clock": args.clock}
    updates, compiled = measure_updates(
        args.batches, args.samples, compiled_in=args.env if args.compile else None, **timing
    )
    by_name = {result.name: result for result in (*updates.values(), *compiled.values())}
    report(by_name, config="MPO update", as_json=args.json, floors={})
    replay = measure_replay(args.env, args.sizes, **timing)
    by_name = {result.name: result for by_size in replay.values() for result in by_size.values()}
    report(by_name, config=f"per frame, {args.env}", as_json=args.json, floors={})
    if not args.json:
        for what, measured in (("update", updates), ("compiled update", compiled)):
            if measured:
                rows = [batch * count for batch, count in measured]
                slope = exponent(rows, [result.median for result in measured.values()])
                print(f"\n{what}: (batch x samples) ** {slope:.2f}")
        for what, by_size in replay.items():
            slope = exponent(list(by_size), [result.median for result in by_size.values()])
            print(f"{what}: (stored frames) ** {slope:.2f}")
    if args.out is not None:
        draw(updates, compiled, replay, args.out)


if __name__ == "__main__":
    main()
