"""What an update costs in other people's training loops, as a ratio to torch's Adam in the same run.

What is timed is the library's own code: `train()` of Stable-Baselines3 and of Hugging Face's Trainer, and a loop over minibatches
as in torchrl's tutorials. AdaHesScale runs inside `hesscale.capture`, with its default, the exact head. In each round every
optimizer trains a block of updates, in an order drawn anew; a ratio is the median over rounds. Seconds are CPU seconds of the
process. Rollouts are collected before the clock starts.

    pip install -c constraints.txt -e ".[integrations]" torchrl
    taskset -c 0 python benchmarks/loops.py --out results/loops
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import torch
from records import header, made_by, save
from torch import Tensor, nn

import hesscale
from hesscale.experiments.bench.measure import digits, message, quartiles, ratios
from hesscale.experiments.lab.markdown import markdown_table
from hesscale.optim.bounds import NEUTRAL

BASELINE = "Adam (torch)"
OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    BASELINE: (torch.optim.Adam, {"eps": 1e-4}),
    "AdaHesScale": (hesscale.AdaHesScale, {"eps": 1e-4}),
    "AdaHesScale, curvature every 10th step": (hesscale.AdaHesScale, {"eps": 1e-4, "curvature_every": 10}),
    "AdaHesScale.paper": (hesscale.AdaHesScale, {"eps": 1e-4, **NEUTRAL}),
    "AdaHesScale.paper, curvature every 10th step": (hesscale.AdaHesScale, {"eps": 1e-4, **NEUTRAL, "curvature_every": 10}),
}
STEP_SIZE = 1e-6  # and a large eps, so that no loop diverges: what an update costs does not depend on them
TARGETS = {name: 1.15 if "10th" in name else 1.8 for name in OPTIMIZERS if name != BASELINE}


@dataclass
class Loop:
    """A training loop that is set up."""

    train: Callable[[], Any]  # a block of updates
    optimizers: Sequence[torch.optim.Optimizer]
    prepare: Callable[[], Any] = lambda: None  # before each block, and not timed

    def seconds(self) -> float:
        self.prepare()
        ours = [optimizer for optimizer in self.optimizers if not isinstance(optimizer, torch.optim.Adam)]
        with hesscale.capture(*ours) if ours else contextlib.nullcontext():
            begun = time.process_time()
            self.train()
            return time.process_time() - begun


def sb3_on_policy(environment: str, updates: int, choice: dict[str, Any]) -> Loop:
    """Stable-Baselines3's PPO with its defaults, but shorter rollouts: minibatches of 64, ten epochs."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger

    steps = 64 * max(1, updates // 10)
    model = PPO("MlpPolicy", environment, STEP_SIZE, n_steps=steps, n_epochs=10, policy_kwargs=choice, seed=0, device="cpu")
    model.set_logger(Logger(folder=None, output_formats=[]))
    _, callback = model._setup_learn(10**9)
    callback.on_training_start({}, {})

    def collect() -> None:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=steps)

    return Loop(model.train, [model.policy.optimizer], collect)


def sb3_off_policy(algorithm: str, environment: str, updates: int, choice: dict[str, Any]) -> Loop:
    """Stable-Baselines3's SAC or DQN with its defaults, on a replay buffer of random actions."""
    import stable_baselines3
    from stable_baselines3.common.logger import Logger

    model = getattr(stable_baselines3, algorithm)(
        "MlpPolicy", environment, STEP_SIZE, learning_starts=10**9, buffer_size=2000, policy_kwargs=choice, seed=0, device="cpu"
    )
    model.learn(1000)  # all of them before learning starts
    model.set_logger(Logger(folder=None, output_formats=[]))
    optimizers = [model.actor.optimizer, model.critic.optimizer] if algorithm == "SAC" else [model.policy.optimizer]
    return Loop(lambda: model.train(gradient_steps=updates, batch_size=model.batch_size), optimizers)


def torchrl_ppo(updates: int, choice: dict[str, Any]) -> Loop:
    """The update of torchrl's PPO tutorial: ClipPPOLoss with an entropy bonus, tanh networks 64-64, minibatches of 64."""
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from tensordict.nn.distributions import NormalParamExtractor
    from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss

    def network(outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    body = nn.Sequential(network(4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(body, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -1.0, "high": 1.0},
        return_log_prob=True,
    )
    critic = ValueOperator(network(1), in_keys=["observation"])
    loss_module = ClipPPOLoss(
        actor, critic, clip_epsilon=0.2, entropy_bonus=True, entropy_coeff=1e-4, critic_coeff=1.0, loss_critic_type="smooth_l1"
    )
    optimizer = choice["optimizer_class"](loss_module.parameters(), lr=STEP_SIZE, **choice["optimizer_kwargs"])
    data = TensorDict({"observation": torch.randn(64 * updates, 8)}, [64 * updates])
    with torch.no_grad():
        actor(data)
        critic(data)
    data["advantage"] = torch.randn(64 * updates, 1)
    data["value_target"] = data["state_value"] + torch.randn(64 * updates, 1)

    def train() -> None:
        for batch in data[torch.randperm(len(data))].split(64):
            losses = loss_module(batch)
            loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            loss.backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return Loop(train, [optimizer])


def huggingface_bert(updates: int, choice: dict[str, Any]) -> Loop:
    """A BERT of two layers, 128 wide, in the Trainer: 16 sentences of 64 tokens; attention, dropout, clipping by default."""
    from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

    config = BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=64,
    )
    ids = torch.randint(config.vocab_size, (16 * updates, 64))
    sentences: list[dict[str, Tensor]] = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=updates,
        per_device_train_batch_size=16,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    model = BertForSequenceClassification(config)
    optimizer = choice["optimizer_class"](model.parameters(), lr=STEP_SIZE, **choice["optimizer_kwargs"])
    trainer = Trainer(model=model, args=arguments, train_dataset=sentences, optimizers=(optimizer, None))
    trainer.remove_callback(PrinterCallback)
    return Loop(trainer.train, [optimizer])


@dataclass(frozen=True)
class Case:
    """A loop to measure, and how many updates a block of it has."""

    title: str
    build: Callable[[int, dict[str, Any]], Loop]
    updates: int


CASES = {
    "sb3-ppo-cartpole": Case("SB3 PPO, CartPole", lambda n, choice: sb3_on_policy("CartPole-v1", n, choice), 80),
    "sb3-ppo-pendulum": Case("SB3 PPO, Pendulum", lambda n, choice: sb3_on_policy("Pendulum-v1", n, choice), 80),
    "torchrl-ppo": Case("torchrl ClipPPOLoss", torchrl_ppo, 40),
    "sb3-sac": Case("SB3 SAC, Pendulum", lambda n, choice: sb3_off_policy("SAC", "Pendulum-v1", n, choice), 20),
    "sb3-dqn": Case("SB3 DQN, CartPole", lambda n, choice: sb3_off_policy("DQN", "CartPole-v1", n, choice), 100),
    "hf-bert": Case("Hugging Face Trainer, BERT", huggingface_bert, 20),
}


def measured(case: Case, updates: int, rounds: int) -> list[dict[str, Any]]:
    """A row for every optimizer in one loop."""
    loops: dict[str, Loop] = {}
    rows = []
    for name, (kind, options) in OPTIMIZERS.items():
        try:
            torch.manual_seed(0)
            loops[name] = case.build(updates, {"optimizer_class": kind, "optimizer_kwargs": options})
            loops[name].seconds()  # the first block decides what later ones have in caches
        except Exception as error:  # the others go on
            loops.pop(name, None)
            rows.append({"loop": case.title, "optimizer": name, "error": message(error)})
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name in random.sample(list(loops), len(loops)):
            seconds[name].append(loops[name].seconds())
    gc.unfreeze()
    base = seconds.get(BASELINE)
    done = [
        {
            "loop": case.title,
            "optimizer": name,
            "updates": updates,
            "ms": quartiles(1e3 * s / updates for s in spent),
            "ratio": ratios(spent, base),
            "times_ms": [digits(1e3 * s / updates) for s in spent],
        }
        for name, spent in seconds.items()
    ]
    return done + rows


def page(found: Mapping[str, Any]) -> str:
    columns = ["loop", "optimizer", "ms an update", "to Adam", "target", "reached"]
    body = [[row["loop"], row["optimizer"], *cells(row)] for row in found["rows"]]
    return (
        f"# Other people's training loops\n\n{made_by(found)}\nMedians of {found['rounds']} rounds; ratios are to torch's "
        "Adam in the same round, with quartiles. AdaHesScale has the exact head everywhere.\n\n"
        f"{markdown_table(columns, body)}"
    )


def cells(row: Mapping[str, Any]) -> list[str]:
    target = TARGETS.get(row["optimizer"])
    wanted = "–" if target is None else f"≤ {target:.2f}"
    if "error" in row:
        return [row["error"], "–", wanted, "–"]
    ms, ratio = row["ms"], row["ratio"]
    if ratio is None or target is None:
        return [f"{ms['median']:.3g}", "–" if ratio is None else "1", wanted, "–"]
    reached = "yes" if ratio["median"] <= target else "**no**"
    return [f"{ms['median']:.3g}", f"{ratio['median']:.2f} ({ratio['q1']:.2f}–{ratio['q3']:.2f})", wanted, reached]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, help="in a block, a multiple of ten; each loop has its own number unless given")
    parser.add_argument("--out", type=Path, default=Path("results/loops"))
    options = parser.parse_args(arguments)
    if options.rounds < 1 or (options.updates is not None and (options.updates < 1 or options.updates % 10)):
        parser.error("--rounds must be at least 1, and --updates a multiple of 10")
    torch.set_num_threads(1)
    random.seed(0)
    found = header("loops.py", arguments) | {"rounds": options.rounds, "rows": []}
    options.out.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", hesscale.CurvatureWarning)  # a head that is not exact has no place in the table
        warnings.filterwarnings("ignore", ".* a step changes a weight", hesscale.CurvatureWarning)  # steps of 1e-6 are harmless
        for name in options.only:
            rows = measured(CASES[name], options.updates or CASES[name].updates, options.rounds)
            found["rows"] += rows
            for row in rows:
                print(row["loop"], row["optimizer"], *cells(row), flush=True)
    save(options.out / "loops", found, page(found))


if __name__ == "__main__":
    main()
