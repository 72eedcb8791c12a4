"""The planner's predictions beside published training runs: errors by source, memory, and what it would choose.

    python tests/bench/planner.py [--rows FILE]

Constants are fitted anew for every source, from all others (leave one source out), on rows of A100-80 whose layout is
complete (tier A). Beside them stand what one constant makes of the FLOPs, a layout picked at random, and
llm-analysis, if it can be imported (`pip install llm-analysis`; no environment of ours has it).
"""

import argparse
import dataclasses
import importlib.util
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools.plan.calibrate import Measured, accuracy, choice, left_out, measured_of, predicted, source_of
from tools.plan.case import Recompute
from tools.plan.constants import constants
from tools.plan.predict import predict_rows
from tools.plan.rows import PUBLISHED, is_complete, read_rows

NAIVE_SHARE = 0.5
"""Of the peak, that the naive formula assumes."""


def naive(run: Measured) -> float:
    """6 FLOPs a parameter and token and attention's, a third more where all is computed again, at half the peak."""
    case = run.case
    flops = case.model_flops * (4 / 3 if case.layout.recompute is Recompute.full else 1.0)
    return flops / (NAIVE_SHARE * case.machine.gpu.bf16_tflops * 1e12)


def show(title: str, runs: Sequence[Measured], times: Mapping[str, float]) -> None:
    """One line of the table for each source, and one for all."""
    print(f"\n{title}\n{'':50s}{'rows':>6s}{'median':>9s}{'bias':>9s}{'in 10 %':>9s}{'15 %':>7s}{'20 %':>7s}")
    for source in [*dict.fromkeys(run.source for run in runs), None]:
        mine = [run for run in runs if source in (None, run.source)]
        found = accuracy(mine, times)
        shares = "".join(
            f"{found.within[limit]:>{width}.0%}" for limit, width in ((0.1, 9), (0.15, 7), (0.2, 7))
        )
        print(f"{source or 'all':50.50s}{found.runs:6d}{found.median:9.1%}{found.bias:+9.1%}{shares}")


def show_choice(runs: Sequence[Measured], ways: Mapping[str, Mapping[str, float]]) -> None:
    """What each way would choose among the layouts of one model, GPUs and batch."""
    random = choice(runs, next(iter(ways.values()))).random_regret
    print("\nChoice among measured layouts: step longer than the best one's, mean over groups")
    print(f"{'':36s}{'groups':>8s}{'regret':>9s}{'rank correlation':>18s}")
    print(f"{'picked at random':36s}{'':8s}{random:9.2%}")
    for name, times in ways.items():
        found = choice(runs, times)
        print(f"{name:36s}{found.groups:8d}{found.regret:9.2%}{found.rank_correlation:18.2f}")


def show_memory(rows: list[dict]) -> None:
    """Predicted memory beside the printed one, and who runs out."""
    print("\nMemory (constants of the file, fitted by hand to the rows' sources together)")
    print(f"{'':50s}{'rows':>6s}{'median':>9s}{'in 10 %':>9s}")
    complete = [row for row in rows if is_complete(row)]
    found = {one["id"]: one for one in predict_rows(complete)}
    for source in dict.fromkeys(source_of(row) for row in complete):
        errors = [
            abs(found[row["id"]]["mem_gb"] / row["measured"]["mem_gb"] - 1)
            for row in complete
            if source_of(row) == source and row["measured"].get("mem_gb") and not row["measured"].get("oom")
        ]
        if errors:
            share = sum(error <= 0.1 for error in errors) / len(errors)
            print(f"{source:50.50s}{len(errors):6d}{statistics.median(errors):9.1%}{share:9.0%}")
    for title, out in (("that ran out of memory", True), ("that ran", False)):
        mine = [found[row["id"]]["oom"] for row in complete if bool(row["measured"].get("oom")) is out]
        print(f"rows {title}: {len(mine)}, predicted to run out: {sum(mine)}")


def peer() -> Callable[[Measured], float] | None:
    """Predict by llm-analysis at the naive share of the peak; None where it is not installed."""
    if importlib.util.find_spec("llm_analysis") is None:
        return None
    logging.disable(logging.WARNING)
    from llm_analysis import analysis, config

    def seconds(run: Measured) -> float:
        case, layout, model = run.case, run.case.layout, run.case.model
        shape = config.ModelConfig(
            model.name,
            model.layers,
            model.heads,
            model.hidden,
            model.vocabulary,
            max_seq_len=case.sequence,
            num_key_value_heads=model.kv_heads,
            # It takes multiples of the hidden size alone; two matrices of this width are three of a gated MLP's.
            ffn_embed_dim=4 * model.hidden if model.gated else model.ffn,
        )
        parallel = config.ParallelismConfig(tp_size=layout.tp, pp_size=layout.pp, dp_size=layout.dp)
        full = layout.recompute is Recompute.full
        again = analysis.ActivationRecomputation.FULL if full else analysis.ActivationRecomputation.NONE
        # Its own GPU has so much memory that it refuses nothing.
        gpu = dataclasses.replace(config.get_gpu_config_by_name("a100-sxm-80gb"), mem_per_GPU_in_GB=1e6)
        # Untouched, it takes all of the peak for granted.
        whole = analysis.LLMAnalysis(shape, gpu, parallelism_config=parallel, flops_efficiency=NAIVE_SHARE)
        found = whole.training(
            batch_size_per_gpu=layout.micro_batch,
            gradient_accumulation_steps=layout.micro_batches,
            seq_len=case.sequence,
            ds_zero=analysis.DSZeRO(layout.zero),
            activation_recomputation=again,
            mlp_gated_linear_units=model.gated,
        )
        return float(found["latency_per_iter"])

    return seconds


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=PUBLISHED, help="published runs")
    rows = read_rows(parser.parse_args().rows)
    runs = measured_of(rows)
    known = constants()
    across = left_out(runs)
    simple = {run.id: naive(run) for run in runs}
    show("Step time, A100-80, constants from all other sources", runs, across)
    show("The same, constants of the file (fitted to these rows)", runs, predicted(runs, known))
    show("One constant times the FLOPs", runs, simple)
    ways = {"planner, left out": across, "one constant times the FLOPs": simple}
    if (other := peer()) is not None:
        others = {run.id: other(run) for run in runs}
        show("llm-analysis at half the peak", runs, others)
        ways["llm-analysis at half the peak"] = others
    else:
        print("\nllm-analysis is not installed: left out")
    show_choice(runs, ways)
    for split, tiers in (("calibrate", ("B",)), ("other_gpu", ("B",)), ("context", ("B", "C"))):
        more = measured_of(rows, tiers, split)
        if more:
            title = f"Rows that nothing was fitted to: split {split}, tier {' and '.join(tiers)}"
            show(title, more, predicted(more, known))
    show_memory(rows)


if __name__ == "__main__":
    main()
