"""Stable-Baselines3 with its own Adam and with ``hesscale.sb3.with_curvature``: what is learned, and what ``train()`` costs.

Every algorithm has Stable-Baselines3's defaults, but for what ``CASES`` changes. Adam and the default AdaHesScale have the same
step size. Optimizers in ``SCALED`` have a trust region, so their step size is 1, and their gradients are not clipped. PPO and A2C
observe and are rewarded through ``VecNormalize``. Returns are of raw rewards, in training. Seconds are those of the processor.

    python benchmarks/sb3_agents.py --out results/sb3

It takes hours on one core. To use several, run parts, each with a folder of its own, and then merge the folders in PARTS:

    python benchmarks/sb3_agents.py --only sac-cheetah --first-seed 2 --seeds 1 --out PARTS/sac-cheetah-2
    python benchmarks/sb3_agents.py --merge PARTS --out results/sb3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # agents train on the CPU, so a record should not name a GPU

import gymnasium
import torch
from records import header, made_by, save

import hesscale
from hesscale.experiments.bench.measure import digits
from hesscale.experiments.lab.compact import compact
from hesscale.experiments.lab.markdown import markdown_table
from hesscale.experiments.lab.statistics import summary

FINAL = 0.2  # the share of the steps whose episodes are the end of a run


@dataclass(frozen=True)
class Case:
    """An algorithm on an environment; ``options`` are those that differ from Stable-Baselines3's defaults."""

    algo: str
    env: str
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    net_arch: tuple[int, ...] | None = None


OFF_POLICY = {"learning_rate": 1e-3, "learning_starts": 500}
OF_DQN = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "learning_starts": 1000,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
}
CASES = {
    "a2c-cartpole": Case("A2C", "CartPole-v1", 10_000, {"use_rms_prop": False}),
    "ppo-cartpole": Case("PPO", "CartPole-v1", 8_192),
    "ppo-pendulum": Case("PPO", "Pendulum-v1", 20_480, {"learning_rate": 1e-3, "gamma": 0.9, "n_steps": 1024}),
    "dqn-cartpole": Case("DQN", "CartPole-v1", 10_000, OF_DQN, (64, 64)),
    "ppo-inverted": Case("PPO", "InvertedPendulum-v5", 20_480),
    "a2c-inverted": Case("A2C", "InvertedPendulum-v5", 20_480, {"use_rms_prop": False}),
    "ppo-hopper": Case("PPO", "Hopper-v5", 20_480),
    "a2c-hopper": Case("A2C", "Hopper-v5", 20_480, {"use_rms_prop": False}),
    "sac-pendulum": Case("SAC", "Pendulum-v1", 10_000, OFF_POLICY, (64, 64)),
    "td3-pendulum": Case("TD3", "Pendulum-v1", 10_000, OFF_POLICY, (64, 64)),
    "sac-inverted": Case("SAC", "InvertedPendulum-v5", 10_000),
    "td3-inverted": Case("TD3", "InvertedPendulum-v5", 10_000),
    "sac-cheetah": Case("SAC", "HalfCheetah-v5", 15_000),
    "td3-cheetah": Case("TD3", "HalfCheetah-v5", 15_000),
}
SCALED = {f"AdaHesScale, step size 1, Δ = {compact(radius)}": radius for radius in (1e-7, 1e-6)}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam (torch)": (None, {}),
    "AdaHesScale": (hesscale.AdaHesScale, {}),
    **{name: (hesscale.AdaHesScale.paper, {"eps": 1e-5, "trust_radius": radius}) for name, radius in SCALED.items()},
}
ON_POLICY = ("PPO", "A2C")  # the radius was chosen with these two algorithms


def agent(case: Case, name: str, seed: int) -> Any:
    import stable_baselines3 as sb3
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    kind, (optimizer, options) = getattr(sb3, case.algo), OPTIMIZERS[name]
    if optimizer is not None:
        kind = hesscale.sb3.with_curvature(kind, optimizer, **options)
    given = {key: value for key, value in case.options.items() if name not in SCALED or key != "learning_rate"}
    env = DummyVecEnv([lambda: Monitor(gymnasium.make(case.env))])
    if case.algo in ON_POLICY:
        env = VecNormalize(env, gamma=case.options.get("gamma", 0.99))
    policy = {} if case.net_arch is None else {"net_arch": list(case.net_arch)}
    return kind("MlpPolicy", env, policy_kwargs=policy, seed=seed, device="cpu", **given)


def learned(case: Case, name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train an agent. Returns its returns and the seconds that ``train()`` took."""
    from stable_baselines3.common.callbacks import BaseCallback

    episodes: list[tuple[int, float]] = []  # the step at which each ended, and its return

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            episodes.extend((self.num_timesteps, info["episode"]["r"]) for info in self.locals["infos"] if "episode" in info)
            return True

    model, spent = agent(case, name, seed), [0.0]
    model.train = timed(model.train, spent)
    model.learn(steps, callback=Watch())
    if spent[0] == 0:
        raise ValueError(f"{case.algo} made no update in {steps} steps; give more --steps")
    last = [total for at, total in episodes if at > (1 - FINAL) * steps]
    means = [digits(statistics.fmean(found)) if found else None for found in ([total for _, total in episodes], last)]
    return {
        "seed": seed,
        "mean_return": means[0],
        "final_return": means[1],
        "train_s": digits(spent[0]),
        "episodes": len(episodes),
    }


def timed(train: Callable[..., None], spent: list[float]) -> Callable[..., None]:
    def counted(*arguments: Any, **options: Any) -> None:
        start = time.process_time()
        train(*arguments, **options)
        spent[0] += time.process_time() - start

    return counted


def measured(name: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """A row for each optimizer. They run one after another with the same seed, so that they meet the same load of the machine."""
    case, rows = CASES[name], []
    for optimizer in OPTIMIZERS:
        if optimizer not in SCALED or case.algo in ON_POLICY:
            start = time.perf_counter()
            run = learned(case, optimizer, seed, steps)
            seconds = time.perf_counter() - start
            print(f"{name}, seed {seed}, {optimizer}: final return {run['final_return']}, {seconds:.0f} s", flush=True)
            row = {"case": name, "algo": case.algo, "env": case.env, "steps": steps, "optimizer": optimizer, "runs": [run]}
            rows.append(row)
    return rows


def joined(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each case and optimizer, with the runs of all seeds, and the time of ``train()`` relative to torch's Adam."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        own = found.setdefault((row["case"], row["steps"], row["optimizer"]), {**row, "runs": []})
        own["runs"] = sorted([*own["runs"], *row["runs"]], key=lambda run: run["seed"])
    for (case, steps, optimizer), row in found.items():
        seeds = [run["seed"] for run in row["runs"]]
        if len(seeds) > len(set(seeds)):
            raise ValueError(f"{case} with {optimizer} has seeds {seeds}; run each seed once")
        adam = {run["seed"]: run["train_s"] for run in found[case, steps, "Adam (torch)"]["runs"]}
        row["to_adam"] = digits(statistics.median(run["train_s"] / adam[run["seed"]] for run in row["runs"]))
    order = [*CASES, *OPTIMIZERS]
    return sorted(found.values(), key=lambda row: (order.index(row["case"]), row["steps"], order.index(row["optimizer"])))


def merged(folder: Path) -> dict[str, Any]:
    """The record of all parts, which lists their commands. A part without a record, since it failed, is an error."""
    parts = [json.loads((part / "sb3.json").read_text(encoding="utf-8")) for part in sorted(folder.iterdir())]
    machines = [part["machine"] for part in parts]
    return {
        "machine": {key: distinct(machine.get(key, "none") for machine in machines) for key in dict(ChainMap(*machines))},
        "commit": distinct(part["commit"] for part in parts),
        "parts": [part["command"] for part in parts],
        "rows": joined(row for part in parts for row in part["rows"]),
    }


def distinct(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values))


def page(found: Mapping[str, Any]) -> str:
    """The table, made from the record alone."""
    names = ["algorithm", "environment", "steps", "optimizer", "seeds", "mean return", "final return", "time of train()"]
    body = [[row["algo"], row["env"], f"{row['steps']:,}", row["optimizer"], *numbers(row)] for row in found["rows"]]
    return (
        f"# Stable-Baselines3 with AdaHesScale\n\n{made_by(found)} Means over\nseeds ± standard errors, of the "
        f"episodes of training: all of them, and those that ended in the last {FINAL:.0%} of the\nsteps. The time of train() is "
        f"relative to torch's Adam with the same seed, a median over seeds. PPO and A2C have normalised\n"
        f"observations and rewards.\n\n{markdown_table(names, body)}"
    )


def numbers(row: Mapping[str, Any]) -> list[str]:
    cells = [str(len(row["runs"]))]
    for key in ("mean_return", "final_return"):
        values = [run[key] for run in row["runs"] if run[key] is not None]
        cells.append(summary(values).text(".0f") if values else "–")
    return [*cells, f"{row['to_adam']:.2f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of every case, in place of its own")
    parser.add_argument("--merge", type=Path, metavar="PARTS", help="run nothing, but merge the records PARTS/*/sb3.json")
    parser.add_argument("--out", type=Path, default=Path("results/sb3"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = header("sb3_agents.py", arguments)
    if options.merge is not None:
        found |= merged(options.merge)
        save(options.out / "sb3", found, page(found))
        return
    rows: list[dict[str, Any]] = []
    for name in options.only:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            rows += measured(name, seed, options.steps or CASES[name].steps)
            found["rows"] = joined(rows)
            save(options.out / "sb3", found, page(found))  # after each seed, since all of them take long


if __name__ == "__main__":
    main()
