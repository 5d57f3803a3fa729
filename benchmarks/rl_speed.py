"""Environment steps per second of PPO and A2C on one core: ours with Adam and AdaHesScale against Stable-Baselines3's with Adam.

The same environments, normalised, the same rollouts and minibatches, and tanh networks 64-64 for policy and value in all; ours
have a third network on top, for the variance of continuous actions. In each round every one of them learns for a while, in an
order drawn anew; a ratio is the median over rounds. With ``--together`` many agents of ours learn as one ensemble, compared with
one of them alone. Seconds are those of the processor; a first block, which compiles, comes before the rounds and is not in them.

    taskset -c 0 python benchmarks/rl_speed.py --out results/rl_speed
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import gymnasium
import torch
from environments import interleaved
from records import header, made_by, save

from hesscale.experiments.bench.measure import digits, message, quartiles, ratios, silence
from hesscale.experiments.bench.methods import NotMeasured
from hesscale.experiments.bench.targets import spread
from hesscale.experiments.lab.markdown import markdown_table
from hesscale.experiments.optimizers import AGENT_OPTIMIZERS
from hesscale.experiments.rl.a2c import A2C
from hesscale.experiments.rl.config import Config
from hesscale.experiments.rl.ppo import PPO

ENVIRONMENTS = ("HalfCheetah-v5", "Hopper-v5", "InvertedDoublePendulum-v5", "CartPole-v1")
ALGORITHMS = {"ppo": PPO, "a2c": A2C}
ITERATIONS = {"ppo": 1, "a2c": 200}  # of a block
LOG_EVERY = {"ppo": 1, "a2c": 100}  # iterations, as Stable-Baselines3 does
STEP_SIZE = 1e-4
SB3 = "sb3"


class Timed:
    """Learns in blocks; ``update_share`` has, for each, the share of its time that was not spent on collecting steps."""

    agent_steps: int

    def __init__(self) -> None:
        self.collecting = 0.0
        self.update_share: list[float] = []

    def collector(self, collect: Callable[..., Any]) -> Callable[..., Any]:
        """The same, with its time counted."""

        def counted(*arguments: Any, **options: Any) -> Any:
            start = time.process_time()
            try:
                return collect(*arguments, **options)
            finally:
                self.collecting += time.process_time() - start

        return counted

    def run(self) -> None:
        self.collecting, start = 0.0, time.process_time()
        self.learn()
        self.update_share.append(1 - self.collecting / (time.process_time() - start))

    def learn(self) -> None:
        raise NotImplementedError

    def rest(self) -> None:
        pass


class Ours(Timed):
    def __init__(self, algo: str, env: str, optimizer: str, together: int) -> None:
        super().__init__()
        self.algo, self.learning = algo, agents(algo, env, optimizer, together)
        self.learning.envs.collect = self.collector(self.learning.envs.collect)
        self.agent_steps = ITERATIONS[algo] * self.learning.rollout * together

    def learn(self) -> None:
        for k in range(ITERATIONS[self.algo]):
            self.learning.iterate(is_logged=k % LOG_EVERY[self.algo] == 0)
        if any(at is not None for at in self.learning.envs.diverged_at):
            raise RuntimeError(f"{self.algo} diverged, and steps that are not made take no time: choose a smaller step size")


def agents(algo: str, env: str, optimizer: str, together: int) -> Any:
    """So many agents that differ in their seeds."""
    return ALGORITHMS[algo]([Config(algo, env, optimizer, STEP_SIZE, seed, steps=10**9) for seed in range(together)])


class StableBaselines3(Timed):
    def __init__(self, algo: str, env: str) -> None:
        super().__init__()
        try:
            import stable_baselines3 as sb3
        except ImportError as error:
            raise NotMeasured(f"stable-baselines3 is not installed, or not with all that it needs ({error})") from None
        from stable_baselines3.common.monitor import Monitor
        from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

        torch.manual_seed(0)
        world = VecNormalize(DummyVecEnv([lambda: Monitor(gymnasium.make(env))]))
        policy = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh}
        common: dict[str, Any] = {"learning_rate": STEP_SIZE, "vf_coef": 1.0, "ent_coef": 0.0, "seed": 0, "device": "cpu"}
        if algo == "ppo":
            sizes = {"n_steps": PPO.rollout, "batch_size": PPO.rollout // PPO.minibatches, "n_epochs": PPO.epochs}
            self.model: Any = sb3.PPO("MlpPolicy", world, **sizes, policy_kwargs=policy, **common)
        else:
            self.model = sb3.A2C("MlpPolicy", world, n_steps=A2C.rollout, use_rms_prop=False, policy_kwargs=policy, **common)
        self.model.collect_rollouts = self.collector(self.model.collect_rollouts)
        self.agent_steps, self.log_every = ITERATIONS[algo] * self.model.n_steps, LOG_EVERY[algo]

    def learn(self) -> None:
        self.model.learn(self.agent_steps, log_interval=self.log_every, reset_num_timesteps=False)


def measured(algo: str, env: str, optimizers: Sequence[str], together: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row for Stable-Baselines3 and for each optimizer and number of agents of ours."""
    makers: list[tuple[str, int, Callable[[], Timed]]] = [(SB3, 1, lambda: StableBaselines3(algo, env))]
    for count in together:
        makers += [(name, count, lambda name=name, count=count: Ours(algo, env, name, count)) for name in optimizers]  # type: ignore[misc]
    rows: list[dict[str, Any]] = []
    cases: dict[int, Timed] = {}
    for k, (name, count, make) in enumerate(makers):
        rows.append({"algo": algo, "env": env, "method": name, "together": count})
        start = time.perf_counter()
        try:
            with silence():  # MuJoCo finds attributes of gymnasium's models that it will not know for ever
                case = make()
            case.run()
        except NotMeasured as error:
            rows[k]["error"] = message(error)
            continue
        cases[k] = case
        rows[k] |= {"agent_steps": case.agent_steps, "first_block_s": digits(time.perf_counter() - start)}
        case.update_share.clear()
    rates = {k: [cases[k].agent_steps / spent for spent in found] for k, found in interleaved(cases, rounds).items()}
    for k, found in rates.items():
        others = {(row["method"], row["together"]): rates[i] for i, row in enumerate(rows) if i in rates}
        seconds = [(share / rate, (1 - share) / rate) for share, rate in zip(cases[k].update_share, found, strict=True)]
        rows[k] |= {
            "steps_per_second": quartiles(found),
            "all_steps_per_second": [digits(rate) for rate in found],
            "to_sb3": ratios(found, others.get((SB3, 1))),
            "to_one": ratios(found, others.get((rows[k]["method"], 1))),
            "update_us": digits(1e6 * statistics.median(update for update, _ in seconds)),
            "rollout_us": digits(1e6 * statistics.median(collect for _, collect in seconds)),
        }
    return rows


def page(found: Mapping[str, Any]) -> str:
    """The tables, made from the record alone."""
    return (
        f"# Speed of reinforcement learning\n\n{made_by(found)} Agent-steps\nper second, medians and quartiles of "
        f"{found['rounds']} rounds; µs of an agent-step for the rollout (policy and environment) and for the update\n(all else). "
        "The time of the first block is by the clock and includes compiling and the imports of libraries.\n\n"
        f"{speeds(found['rows'])}"
    )


def speeds(rows: Sequence[Mapping[str, Any]]) -> str:
    names = [
        "",
        "environment",
        "optimizer",
        "agents",
        "steps/s",
        "to Stable-Baselines3",
        "to one agent",
        "rollout, µs",
        "update, µs",
    ]
    body, notes = [], []
    for row in rows:
        label = "Stable-Baselines3, Adam" if row["method"] == SB3 else f"ours, {AGENT_OPTIMIZERS[row['method']].label}"
        start = [row["algo"].upper(), row["env"], label, str(row["together"])]
        if "error" in row:
            notes.append(f"- {', '.join(start[:3])}: {row['error']}")
            continue
        rate = row["steps_per_second"]
        cells = [f"{rate['median']:,.0f} ({rate['q1']:,.0f}–{rate['q3']:,.0f})"]
        cells += [spread(row[key]) if row[key] else "–" for key in ("to_sb3", "to_one")]
        cells += [f"{row['rollout_us']:.3g}", f"{row['update_us']:.3g}", f"{row['first_block_s']:.3g}"]
        body.append([*start, *cells])
    return markdown_table([*names, "first block, s"], body) + ("\nNot measured:\n\n" + "\n".join(notes) + "\n" if notes else "")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--algos", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--envs", nargs="+", default=ENVIRONMENTS, help="any of gymnasium's")
    parser.add_argument("--optimizers", nargs="+", choices=AGENT_OPTIMIZERS, default=["adam", "adahesscale"], help="ours")
    parser.add_argument("--together", nargs="+", type=int, default=[1], help="agents of ours that learn as one ensemble")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("results/rl_speed"))
    parser.add_argument("--name", default="rl_speed", help="of the files")
    options = parser.parse_args(arguments)
    if min(*options.together, options.rounds) < 1:
        parser.error("--together and --rounds must be at least 1")
    found = header("rl_speed.py", arguments) | {"rounds": options.rounds, "rows": []}
    with one_thread():
        for algo in options.algos:
            for env in options.envs:
                start = time.perf_counter()
                found["rows"] += measured(algo, env, options.optimizers, options.together, options.rounds)
                print(f"{algo}, {env}: {time.perf_counter() - start:.0f} s", flush=True)
    save(options.out / options.name, found, page(found))


if __name__ == "__main__":
    main()
